"""Each pipeline stage sends what it holds and nothing else: together the whole model."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from engine_under_test import start_engine
from megatron_families import make_checkpoint
from megatron_helpers import end_groups, in_processes, make_family, megatron_args
from tiny_model import make_tiny_model

from slime.utils.async_utils import run
from slime.weight_sync.base import SenderOptions, Target
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.stage_turns import StageTurns
from slime.weight_sync.transports import transport_of
from slime.wire.control import EngineControl

pytestmark = pytest.mark.megatron

TWO = {
    "plain pp2": dict(pp=2),
    "tied pp2": dict(pp=2),
    "tied pp2 vpp2": dict(pp=2, vpp=2),
    "moe pp2": dict(pp=2),
    "moe tp2 sp": dict(tp=2, sp=True),
    "mimo pp2": dict(pp=2, enable_mtp_training=True),
}
FOUR = {
    "plain tp2 pp2": dict(tp=2, pp=2),
    "tied pp2 cp2": dict(pp=2, cp=2),
    "moe ep2 pp2": dict(ep=2, pp=2),
}
SMALL = dict(update_weight_buffer_size=20_000)  # several buckets per stage


def push_all(
    rank: int, world_size: int, cases: dict[str, tuple[str, dict]], urls: dict[str, str], folder: str
) -> dict:
    """For each case what each stage exported, and the report of a push to its engine."""
    from slime.backends.megatron import create_backend

    results = {}
    for name, (model, settings) in cases.items():
        end_groups()
        backend = create_backend(
            megatron_args(model, **SMALL, **settings), rank=rank, world_size=world_size, device="cpu"
        )
        with torch.no_grad():
            for parameter in (p for chunk in backend.model for p in chunk.parameters()):
                parameter.mul_(0.5).add_(0.01)  # other weights than any engine has read
        whole = [(key, tensor.clone()) for bucket in backend.export() for key, tensor in bucket]
        own = [[(key, tensor.clone()) for key, tensor in bucket] for bucket in backend.export_stage()]
        layout, stages = backend.layout, [None] * world_size
        dist.all_gather_object(stages, (layout.pp_rank, layout.is_first_of_stage, own))
        results[name] = {"whole": whole, "stages": stages}
        if name in urls:
            report = push(backend, rank, urls[name], f"run:{name}")
            results[name]["report"] = report
            if rank == 0:
                results[name]["folder"] = written(whole, Path(folder) / f"disk {name}", model)
            dist.barrier()
    return results


def push(backend, rank: int, url: str, version: str):
    layout = backend.layout
    options = SenderOptions("slime-x", Path("unused"), "model", rank, deadline_s=30.0, stage=layout.pp_rank)
    sender = DistributedSender(options) if layout.is_first_of_stage else None
    report = StageTurns(layout.pp_rank, layout.pp_size, sender).send(
        version, (Target(url, 1, 1, ()),), backend.export_stage()
    )
    if sender is not None:
        sender.close()
    return report


def written(named, folder: Path, model: str) -> Path:
    sender = transport_of("disk").make_sender(SenderOptions("slime-x", folder, model, keep_files=True))
    sender.send(named)
    return sender.finish("run:disk").payload


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stage_push")


@pytest.fixture(scope="module")
def models(folder):
    return {
        "plain": str(make_tiny_model(folder / "plain", layers=4)),
        "tied": str(make_tiny_model(folder / "tied", layers=4, tie_word_embeddings=True)),
        "moe": make_family(folder / "moe", "qwen3_moe"),
        "mimo": make_checkpoint(folder, "mimo")[0],
    }


@contextlib.contextmanager
def engines(models, names, folder):
    """name of the case -> address of an engine of its model; models without a tokenizer get none."""
    flags = ("--max-running-requests", "2", "--max-total-tokens", "2048", "--dtype", "float32")
    with contextlib.ExitStack() as stack:
        served = {
            kind: stack.enter_context(start_engine(Path(models[kind]), folder, *flags))[0] for kind in names
        }
        yield served


@pytest.fixture(scope="module")
def served(models, folder):
    with engines(models, ("plain", "tied"), folder) as urls:
        yield urls


def run_table(table, world_size, models, served, folder):
    cases = {name: (models[name.split()[0]], settings) for name, settings in table.items()}
    urls = {name: served[name.split()[0]] for name in table if name.split()[0] in served}
    found = in_processes(world_size, push_all, folder, cases, urls, str(folder))
    # One engine serves several cases: what it holds is looked at after the last one of them, at once.
    for name in {url: name for name, url in urls.items()}.values():
        found[name]["held"] = held_by(urls[name], found[name]["folder"])
    return found


def held_by(url: str, folder: str) -> tuple[str, Any, Any]:
    """Of an engine: its version, its checksums, and those after it has read the same weights from disk."""
    control = EngineControl(url)
    version, pushed = run(control.version()), run(control.checksums())
    run(control.update_from_disk(str(folder), "run:disk"))
    return version, pushed, run(control.checksums())


@pytest.fixture(scope="module")
def two(models, served, folder):
    return run_table(TWO, 2, models, served, folder)


@pytest.fixture(scope="module")
def four(models, served, folder):
    return run_table(FOUR, 4, models, served, folder)


def check_stages(found) -> None:
    """The first ranks' buckets, in the order of stages, are the whole model, and nothing twice."""
    firsts = sorted((stage, own) for stage, is_first, own in found["stages"] if is_first)
    assert [stage for stage, _ in firsts] == list(range(len(firsts)))
    together = [item for _, own in firsts for bucket in own for item in bucket]
    assert [name for name, _ in together] == [name for name, _ in found["whole"]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(together, found["whole"], strict=True))
    assert all(len(own) > 1 for _, own in firsts), "several buckets, or their order means nothing"


def check_engine(found, expected: str) -> None:
    assert found["report"].failures == {} and found["report"].num_tensors == len(found["whole"])
    version, pushed, from_disk = found["held"]
    assert version == expected
    assert from_disk == pushed


@pytest.mark.parametrize("name", TWO)
def test_the_stages_of_two_ranks_make_the_whole_model(two, name):
    check_stages(two[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_the_stages_of_four_ranks_make_the_whole_model(four, name):
    check_stages(four[name])


def test_a_tied_matrix_and_mtp_heads_are_sent_once_each(two):
    names = [name for name, _ in two["tied pp2"]["whole"]]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names
    heads = [
        stage
        for stage, _, own in two["mimo pp2"]["stages"]
        for b in own
        for name, _ in b
        if "mtp_layers" in name
    ]
    assert heads and set(heads) == {1}, "the last stage holds them"


@pytest.mark.parametrize("name", ["plain pp2", "tied pp2 vpp2"])
def test_an_engine_holds_after_a_push_by_two_stages_what_a_push_by_disk_gives(two, name):
    check_engine(two[name], f"run:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain tp2 pp2", "tied pp2 cp2"])
def test_an_engine_holds_the_same_from_stages_of_several_ranks(four, name):
    check_engine(four[name], f"run:{name}")


def test_the_exported_model_is_not_the_one_that_engines_have_read(two, models):
    from safetensors.torch import load_file

    read = load_file(Path(models["plain"]) / "model.safetensors")
    assert not any(torch.equal(read[name], tensor) for name, tensor in two["plain pp2"]["whole"])
