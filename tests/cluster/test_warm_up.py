"""Layers are compiled on a model of one layer before the trainer has its own; it leaves nothing behind."""

import contextlib
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from patience import LONG_S

from slime.arguments import default_args
from slime.backends.shared.host_memory import BLOCK_BYTES
from slime.cluster import parts
from slime.cluster.training import warm_up
from slime.runtime.base import Ready


@contextlib.contextmanager
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}])
def test_one_layer_of_a_model_takes_a_step(tmp_path, monkeypatch, adapters):
    from transformers import Qwen3Config

    from slime.backends.attention.shared_prefixes import PrefixShare
    from slime.step.training_step import TrainingStep

    config = Qwen3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    seen = []
    run = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda step: (seen.append(step), run(step))[1])
    monkeypatch.setattr(warm_up, "_LONG", 2048)
    shares = []
    of = PrefixShare.of
    monkeypatch.setattr(PrefixShare, "of", lambda *a, **k: shares.append(of(*a, **k)) or shares[-1])
    args = default_args(hf_checkpoint=str(tmp_path), dtype="float32", compile=False, **adapters)
    with _alone():
        warm_up._train_one_layer(args, str(tmp_path / "layer"), torch.device("cpu"))
    assert [len(step.batch["tokens"]) for step in seen] == [4, 4, 2]
    assert [share is not None for share in shares] == [True, False, False]  # layers are compiled for both
    shape = seen[0].backend.model.lm.config
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size) == (1, 32, 512)
    names = [name for name, p in seen[0].backend.model.lm.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name in names) == bool(adapters)


def test_memory_is_locked_for_what_will_leave_the_device(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    numbers = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())

    def blocks(**flags):
        flags = {"offload_train": False, "update_weight_buffer_size": 1 << 20, **flags}
        return warm_up._blocks_to_lock(default_args(hf_checkpoint=str(tmp_path), **flags))

    pushed = (2 * numbers, 1 << 20)
    assert blocks() == [pushed]
    assert blocks(offload_train=True) == [(12 * numbers, BLOCK_BYTES), pushed]
    megatron = dict(train_backend="megatron", offload_train=True)
    assert blocks(**megatron, dtype="bfloat16") == [(14 * numbers, BLOCK_BYTES), pushed]
    assert blocks(**megatron, dtype="float32") == [(12 * numbers, BLOCK_BYTES), pushed]
    assert blocks(offload_train=True, lora_rank=4) == [(4 * numbers, BLOCK_BYTES), pushed]
    half = blocks(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half == [(4 * numbers, BLOCK_BYTES), pushed]


class Steps:
    """Stands for the parts of a warm-up, each of which may fail; `order` says how they went."""

    def __init__(self, monkeypatch, **failures: Exception):
        self.order, self.alone, self._failures = [], [], failures
        self.begun = {name: threading.Event() for name in ("compile", "lock")}
        monkeypatch.setattr(warm_up, "_blocks_to_lock", self.count)
        monkeypatch.setattr(warm_up, "_compile_layers", lambda args, device: self._do("compile", "lock"))
        monkeypatch.setattr(warm_up, "lock_ahead", self.lock)

    def run(self, **flags) -> None:
        args = default_args(**{"hf_checkpoint": "model", "train_backend": "fsdp", **flags})
        warm_up.warm_up(args, torch.device("cuda", 0))

    def count(self, args) -> list[tuple[int, int]]:
        self.order.append("count")
        assert threading.current_thread() is threading.main_thread()
        if "count" in self._failures:
            raise self._failures["count"]
        return [(64, 8)]

    def lock(self, nbytes, block_bytes, between) -> None:
        assert (nbytes, block_bytes) == (64, 8)
        self._do("lock", "compile")
        between()
        time.sleep(0.2)  # so that a warm-up that did not wait would be over
        self.order.append("locked")

    def _do(self, what: str, beside: str) -> None:
        self.order.append(what)
        self.begun[what].set()
        if not self.begun[beside].wait(0 if "alone" in self._failures else LONG_S):
            self.alone.append(what)
        if what in self._failures:
            raise self._failures[what]


def test_memory_is_locked_beside_compiling_and_both_have_ended_on_return(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run()
    assert steps.alone == []  # each waited for the other to begin
    assert steps.order[0] == "count" and sorted(steps.order[1:3]) == ["compile", "lock"]
    assert steps.order[3:] == ["locked"]


@pytest.mark.parametrize(
    ("failing", "done", "told"),
    [
        (
            "compile",
            "locked",
            "Not layers compiled in advance (the first step does it): RuntimeError: no room",
        ),
        (
            "lock",
            "compile",
            "Not host memory page-locked in advance (the first step does it): RuntimeError: no room",
        ),
    ],
)
def test_a_part_of_a_warm_up_that_fails_is_told_and_the_other_is_done(
    monkeypatch, caplog, failing, done, told
):
    steps = Steps(monkeypatch, **{failing: RuntimeError("no room")})
    with caplog.at_level("INFO", logger="slime"):
        steps.run()
    assert told in caplog.text and done in steps.order


def test_memory_that_cannot_be_counted_is_not_locked_and_layers_are_compiled(monkeypatch, caplog):
    steps = Steps(monkeypatch, count=OSError("no such model"), alone=RuntimeError())
    with caplog.at_level("INFO", logger="slime"):
        steps.run()
    assert steps.order == ["count", "compile"] and "OSError: no such model" in caplog.text


def test_layers_with_adapters_are_compiled_too(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run(lora_rank=8)
    assert "compile" in steps.order


def test_memory_is_locked_where_nothing_is_compiled(monkeypatch):
    steps = Steps(monkeypatch, alone=RuntimeError())
    steps.run(compile=False)
    assert steps.order == ["count", "lock", "locked"]


def test_a_trainer_with_layers_of_its_own_loads_its_code_and_locks_memory(monkeypatch, caplog):
    steps, loaded = Steps(monkeypatch, alone=RuntimeError()), []
    monkeypatch.setattr(warm_up, "load_function", loaded.append)
    with caplog.at_level("INFO", logger="slime"):
        steps.run(train_backend="megatron")
    assert steps.order == ["count", "lock", "locked"] and loaded == ["slime.backends.megatron.create_backend"]
    assert "code loaded before the model is loaded" in caplog.text


def test_whoever_compiles_gets_a_turn_after_each_block_and_nobody_waits_for_a_turn_after_that(monkeypatch):
    monkeypatch.setattr(warm_up, "_TURN_S", LONG_S)
    turns, compiled = [], threading.Event()

    def lock(nbytes, block_bytes, between) -> None:
        compiled.set()  # while the others have their turn
        turns.extend(between() for _ in range(100))

    monkeypatch.setattr(warm_up, "lock_ahead", lock)
    started = time.monotonic()
    warm_up._lock([(64, 8)], compiled)
    assert turns == [True] * 100 and time.monotonic() - started < LONG_S


def test_a_failure_is_left_to_those_who_load_the_model(tmp_path, caplog):
    args = default_args(hf_checkpoint=str(tmp_path), train_backend="fsdp")
    with caplog.at_level("INFO", logger="slime"):
        warm_up.warm_up(args, torch.device("cpu"))  # nothing to compile on a CPU
    assert not caplog.records


def test_a_colocated_trainer_warms_up_while_engines_start():
    order = []

    class Ranks:
        def warm_up(self):
            order.append("warm up")

        def load(self, folder):
            order.append("load")
            return "trainer"

    room = types.SimpleNamespace(make_room=lambda: order.append("room"))
    found = parts._load_both(
        types.SimpleNamespace(colocate=True),
        (Ready(None), Ready("facts")),
        Ranks(),
        None,
        room,
    )
    assert found == ("facts", "trainer")
    assert order == ["warm up", "room", "load"]
