"""The difference of log-probs between engine and trainer is the same under every layout."""

import pytest

pytest.importorskip("megatron.core")

from devices import DEVICE
from megatron_helpers import GRPO, end_groups, in_processes, make_family, megatron_args, training_step
from trainer_helpers import random_samples

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

TWO = {
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "cp2": dict(cp=2),
    "dp2": {},
    "two steps, cp2": dict(cp=2, global_batch_size=4),
}


def compare(rank: int, world_size: int, model: str, cases: dict) -> dict:
    """Per case: metrics of a rollout with random engine log-probs, and that a threshold stops it."""
    from slime.backends import fsdp, megatron
    from slime.utils.errors import RunStopped

    results = {}
    for name, changes in cases.items():
        end_groups()
        changes = dict(changes)
        module = fsdp if changes.pop("fsdp", False) else megatron
        settings = GRPO | {
            "optimizer": "sgd",
            "global_batch_size": 8,
            "logprob_diff_threshold": 0.0,
            **changes,
        }
        args = megatron_args(model, **settings)
        backend = module.create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
        samples = random_samples(2, 4, vocab=127)
        steps = training_step(backend, args, samples, weight_version=1).run().steps
        args = args.replace(logprob_diff_threshold=0.02)
        try:
            training_step(backend, args, samples, 1, weight_version=2).run()
            raise AssertionError(f"{name}: rank {rank} went on")
        except RunStopped:
            pass
        results[name] = steps[0]["train/logprob_abs_diff/lag_0"], steps[0]["train/staleness/lag_0"]
    return results


def test_every_layout_finds_the_same_difference_and_every_rank_stops(tmp_path):
    model = make_family(tmp_path / "model", "qwen3")
    reference = in_processes(1, compare, tmp_path, model, {"fsdp": dict(fsdp=True), "one": {}})
    difference, share = reference["fsdp"]
    assert difference > 0.5 and share == 1.0
    for name, found in (reference | in_processes(2, compare, tmp_path, model, TWO)).items():
        assert found == pytest.approx((difference, share), rel=1e-4), name
