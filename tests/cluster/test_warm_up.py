"""Layers are compiled on a model of one layer before the trainer has its own; it leaves nothing behind."""

import contextlib
import threading
import types

import torch
import torch.distributed as dist

from slime.arguments import default_args
from slime.cluster import start
from slime.cluster.training import warm_up


@contextlib.contextmanager
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_one_layer_of_a_model_takes_a_step(tmp_path, monkeypatch):
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
    args = default_args(hf_checkpoint=str(tmp_path), dtype="float32", compile=False)
    with _alone():
        warm_up._train_one_layer(args, str(tmp_path / "layer"), torch.device("cpu"))
    assert [len(step.batch["tokens"]) for step in seen] == [4, 4, 2]
    assert [share is not None for share in shares] == [True, False, False]  # layers are compiled for both
    shape = seen[0].backend.model.lm.config
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size) == (1, 32, 512)


def test_memory_is_locked_for_what_will_leave_the_device(tmp_path, monkeypatch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    numbers = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())
    locked = []
    monkeypatch.setattr(warm_up, "lock_ahead", lambda *sizes: locked.append(sizes))

    def lock(**flags):
        locked.clear()
        flags = {"offload_train": False, "update_weight_buffer_size": 1 << 20, **flags}
        warm_up._lock_host_memory(default_args(hf_checkpoint=str(tmp_path), **flags))
        return list(locked)

    pushed = (2 * numbers, 1 << 20)
    assert lock() == [pushed]
    assert lock(offload_train=True) == [(12 * numbers,), pushed]
    assert lock(offload_train=True, lora_rank=4) == [(4 * numbers,), pushed]
    half = lock(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half == [(4 * numbers,), pushed]


def test_a_failure_is_left_to_those_who_load_the_model(tmp_path, caplog):
    args = default_args(hf_checkpoint=str(tmp_path), train_backend="fsdp")
    with caplog.at_level("INFO", logger="slime"):
        warm_up.warm_up(args, torch.device("cpu"))  # nothing to compile on a CPU
    assert not caplog.records


def test_a_colocated_trainer_warms_up_while_engines_start():
    warmed = threading.Event()
    order, noted = [], []

    class Ranks:
        def warm_up(self):
            order.append("warm up")
            warmed.set()

        def load(self, folder):
            order.append("load")
            return "trainer"

        def describe(self):
            return ""

    class Rollout:
        def result(self, deadline_s=None):
            assert warmed.wait(30)
            return "facts"

        def done(self):
            return True

        def add_done_callback(self, function):
            function(self)

    room = types.SimpleNamespace(make_room=lambda: order.append("room"))
    found = start._load_both(
        types.SimpleNamespace(colocate=True),
        Rollout(),
        1,
        Ranks(),
        None,
        room,
        lambda: noted.append(order[:2]),
    )
    assert found == ("facts", "trainer")
    assert order == ["warm up", "room", "load"]
    assert noted == [["warm up", "room"]]  # beside the trainer's load
