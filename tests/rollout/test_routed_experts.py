"""The experts that an engine chose are asked for, and recorded with the tokens they belong to."""

import base64
import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine
from ledger_world import World
from rollout_helpers import make_args, make_run, make_source, workers_of

from slime.arguments import plugin_args
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.rollout import ledger
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import codec
from slime.utils.packed_samples import packed_array, references_in
from slime.utils.stored_arrays import KeptArrays, StoredArray
from slime.utils.types import Sample, flatten_samples

LAYERS, TOPK = 3, 2


def routed(num_tokens: int) -> np.ndarray:
    """[T - 1, layers, topk]: an engine never runs the last token."""
    return np.arange((num_tokens - 1) * LAYERS * TOPK, dtype=np.int32).reshape(-1, LAYERS, TOPK)


def tell_experts(payload, number):
    if not payload.get("return_routed_experts"):
        return None
    tokens = [11, 12, 13][: 3 if number % 2 else 2]
    choices = routed(len(payload["input_ids"]) + len(tokens))
    return {"tokens": tokens, "meta": {"routed_experts": base64.b64encode(choices.tobytes()).decode()}}


def test_the_experts_of_every_token_but_the_last_are_recorded(tmp_path):
    with FakeEngine(tell_experts) as engine:
        args = make_args(tmp_path, engine, num_layers=LAYERS, moe_router_topk=TOPK)
        args.use_rollout_routing_replay = True  # a flag of a trainer that need not be installed here
        output = generate_rollout(args, 0, make_source(args))
    samples = flatten_samples(output.samples)
    assert {sample.response_length for sample in samples} == {2, 3}
    for sample in samples:
        np.testing.assert_array_equal(sample.rollout_routed_experts, routed(len(sample.tokens)))


def test_without_replay_nobody_asks_for_experts(tmp_path):
    with FakeEngine(tell_experts) as engine:
        args = make_args(tmp_path, engine)
        output = generate_rollout(args, 0, make_source(args))
        assert not any("return_routed_experts" in request for request in engine.requests)
    assert all(sample.rollout_routed_experts is None for sample in flatten_samples(output.samples))


@pytest.fixture
def replaying(tmp_path):
    """The arguments and facts of a run that replays, against an engine that reports its experts."""
    with FakeEngine(tell_experts) as engine:
        facts = {"num_layers": LAYERS, "moe_router_topk": TOPK}
        args, info = make_run(tmp_path, engine, "--rollout-workers", "2", **facts)
        yield args.replace(use_rollout_routing_replay=True), info, engine


def files(info):
    return sorted(path.name for path in Path(info.run_dir, "arrays").iterdir())


def references(output):
    return [packed_array(sample, "rollout_routed_experts") for sample in flatten_samples(output.samples)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_driver_passes_on_references_and_the_rank_reads_the_arrays(tmp_path, replaying, num_workers):
    args, info, _ = replaying
    namespace = plugin_args(args, info)
    with workers_of(tmp_path, args, info) if num_workers > 1 else contextlib.nullcontext():
        output = generate_rollout(namespace, 0, make_source(namespace))
    batch = samples_to_batch(namespace, output.samples)
    assert batch["routed_experts"] == references(output) and len(files(info)) == 8
    assert all(isinstance(array, StoredArray) and array.dtype == "|u1" for array in batch["routed_experts"])
    stored = codec.decode(codec.encode(batch))  # what the record keeps
    for held in (batch, stored):
        [share] = split_for_ranks(args, held, 1)
        received = pickle.loads(pickle.dumps(share)).batch
        for tokens, array in zip(received["tokens"], received["routed_experts"], strict=True):
            np.testing.assert_array_equal(array.numpy(), routed(len(tokens)))
    sample = flatten_samples(output.samples)[0]
    assert sample.rollout_routed_experts.dtype == np.int32  # whoever looks sees the engine's numbers
    np.testing.assert_array_equal(sample.to_dict()["rollout_routed_experts"], routed(len(sample.tokens)))


def test_a_finished_sample_is_recalled_with_its_experts_and_made_again_without_them(tmp_path, replaying):
    args, info, engine = replaying
    namespace, results, world = plugin_args(args, info), [], World(tmp_path)
    for lost in (False, False, True):
        if lost:
            Path(results[0][0].path).write_bytes(b"")
        durable = world.start()
        durable.begin(0, "run:1")
        ledger.use(durable)
        arrays = KeptArrays(info.run_dir, {}, durable.references())
        results.append(references(generate_rollout(namespace, 0, make_source(namespace))))
        ledger.use(None)
        world.stop()
    assert results[0] == results[1] and len(engine.requests) == 9
    assert results[2][1:] == results[0][1:] and results[2][0].load().tolist() == routed(4).tolist()
    assert len(files(info)) == 8  # the damaged one is removed
    arrays.keep(3, results[2][:6])
    arrays.forget(2)
    assert len(files(info)) == 8
    arrays.forget(3)
    assert len(files(info)) == 2


def test_a_dropped_group_releases_its_arrays_and_a_buffer_keeps_references(replaying, caplog):
    args, info, _ = replaying
    namespace = plugin_args(args, info)
    source = make_source(namespace)
    groups = generate_rollout(namespace, 0, source).samples
    source.settle(groups[:1], "filtered", "test")
    arrays = KeptArrays(info.run_dir, {}, [a for s in flatten_samples(groups) for a in references_in(s)])
    assert len(files(info)) == 8
    arrays.remove(source.journal.drain_unneeded())
    assert len(files(info)) == 6
    source.add_samples(groups[:2])
    resumed = make_source(namespace)
    resumed.load_state_dict(codec.decode(codec.encode(source.state_dict())))
    lost, kept = resumed.buffer[0][0], resumed.buffer[1][0]
    np.testing.assert_array_equal(kept.rollout_routed_experts, routed(len(kept.tokens)))
    assert lost.status is Sample.Status.PENDING and lost.response_length == 0
    assert "starts again from its prompt" in caplog.text
