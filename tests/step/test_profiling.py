"""Flags with which steps are debugged: what a rank records of itself, and passes with sizes of their own."""

import gzip
import json
import sys

import pytest
import torch
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.step.profiling import ACTOR, LOG_PROBS, StepProfiler

LOSS = """
calls = []


def loss(args, batch, logits, reduce):
    calls.append(1)
    return (logits.log_softmax(-1)[:, 5] * logits[:, 7].sigmoid()).sum(), {}
"""


def test_the_parts_that_are_asked_for_are_recorded_in_their_rollouts(model, tmp_path):
    options = dict(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, run_dir=str(tmp_path))
    profiler = StepProfiler(trainer_args(model, **options, profile_target=[ACTOR, LOG_PROBS]), 0)
    for rollout_id in (4, 5, 6):
        with profiler.rollout(rollout_id):
            with profiler.part(LOG_PROBS):
                torch.ones(2).exp()
            with profiler.part(ACTOR):
                torch.ones(2).cosh()
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == [
        "train_actor_rollout5_rank0.json.gz",
        "train_log_probs_rollout5_rank0.json.gz",
    ]
    names = {event.get("name") for event in json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]}
    assert "aten::cosh" in names and "aten::exp" not in names


def test_host_memory_is_recorded(model, tmp_path):
    pytest.importorskip("memray")
    options = dict(record_memory_history=True, memory_recorder="memray", memory_snapshot_num_steps=1)
    profiler = StepProfiler(trainer_args(model, run_dir=str(tmp_path), **options), 2)
    with profiler.rollout(0):
        bytearray(1 << 20)
    profiler.close()
    assert (tmp_path / "memory" / "rank2_memray.bin").stat().st_size > 0


def test_a_loss_that_is_computed_again_gives_the_same_weights(model, tmp_path):
    (tmp_path / "own.py").write_text(LOSS)
    own = dict(loss_type="custom_loss", custom_loss_function_path=f"{tmp_path}/own.py:loss", clip_grad=0.0)
    weights, calls = {}, {}
    for again in (False, True):
        args = trainer_args(model, **own, recompute_loss_function=again, skip_on_policy_check=True)
        backend = backend_of(args)
        train(backend, args, random_samples(2, 2), agreement=None)
        weights[again] = weights_of(backend)
        plugin = next(
            m for m in list(sys.modules.values()) if getattr(m, "__file__", "") == f"{tmp_path}/own.py"
        )
        calls[again] = len(plugin.calls)
        plugin.calls.clear()
    assert calls[True] == 2 * calls[False] > 0
    assert all((weights[True][name] == weights[False][name]).all() for name in weights[True])


def count_and_call(seen, original, micro_batches, **options):
    seen.append(len(micro_batches))
    return original(micro_batches, **options)
