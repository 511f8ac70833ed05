"""Whole runs that sample from a part of the vocabulary:
engine and trainer mean the same distribution, and it learns.
"""

import pytest
import torch
from loop_helpers import make_world, run_train, series

from slime.arguments.passthrough.sglang_flags import find_python
from slime.rollout.dumps import load_rollout_dump

TOP_P = dict(
    rollout_top_p=0.9,
    rollout_temperature=0.8,
    global_batch_size=8,  # two steps: the second one's ratios are not 1
    lr=3e-3,
    use_kl_loss=True,
    kl_loss_coef=0.01,
    kl_loss_type="k3",
)


def test_a_run_with_top_p_trains_the_distribution_that_it_samples_from(tmp_path):
    world = make_world(tmp_path)
    dump = str(tmp_path / "rollout_{rollout_id}.pt")
    run_train(world, "run", num_rollout=4, save_debug_rollout_data=dump, **TOP_P)
    difference = series(world, "run", "train/logprob_abs_diff/lag_0")
    assert len(difference) == 4 and max(difference.values()) < 2e-6, difference
    kept = series(world, "run", "rollout/top_p_kept_vocab_per_token")
    assert all(1.0 < count < 0.95 * 128 for count in kept.values()), kept
    for sample in load_rollout_dump(dump, 3):
        ids, bounds = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        assert ids.dtype == torch.int32 and len(bounds) == sample.response_length + 1
        response = sample.tokens[-sample.response_length :]
        for token, start, end in zip(response, bounds[:-1], bounds[1:], strict=True):
            assert token in ids[start:end].tolist() and end - start < 128
    # The same samples again, without engines: what they were drawn from is part of them.
    run_train(world, "again", num_rollout=1, load_debug_rollout_data=dump, **TOP_P)
    for name in ("train/loss", "train/entropy_loss", "train/grad_norm"):
        assert abs(series(world, "again", name)[0] - series(world, "run", name)[0]) < 1e-5


@pytest.mark.sglang
def test_a_run_on_sglang_trains_over_the_ids_that_sglang_kept(tmp_path):
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    world = make_world(tmp_path)
    dump = str(tmp_path / "rollout_{rollout_id}.pt")
    run_train(
        world,
        "run",
        timeout=1200,
        num_rollout=2,
        rollout_engine="sglang",
        timeouts="engine-start=900",
        save_debug_rollout_data=dump,
        **TOP_P,
    )
    difference = series(world, "run", "train/logprob_abs_diff/lag_0")
    assert len(difference) == 2 and max(difference.values()) < 1e-5, difference
    kept = series(world, "run", "rollout/top_p_kept_vocab_per_token")
    assert all(1.0 < count < 0.95 * 128 for count in kept.values()), kept
    for sample in load_rollout_dump(dump, 1):
        assert len(sample.rollout_top_p_token_offsets) == sample.response_length + 1
