"""Rollout dumps: what was saved is what comes back, and files with code in them are refused."""

import numpy as np
import pytest
import torch

from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.utils.types import RewardFailure, Sample


def make_samples():
    full = Sample(index=0, group_index=0, tokens=[1, 2, 3], reward=0.5, metadata={"a": {"b": [1]}})
    full.response_length, full.rollout_log_probs, full.loss_mask = 2, [-0.1, -0.2], [1, 0]
    full.version_spans, full.status = [("run:1", 0, 2)], Sample.Status.TRUNCATED
    failed = Sample(index=1, group_index=0, reward_failure=RewardFailure("infra_error", "down"))
    return full, failed


def test_samples_survive_a_round_trip(tmp_path):
    full, failed = make_samples()
    template = str(tmp_path / "dumps" / "r_{rollout_id}.pt")
    save_rollout_dump(template, 4, [[full, [failed]]])
    assert load_rollout_dump(template, 4) == [full, failed]
    assert [p.name for p in (tmp_path / "dumps").iterdir()] == ["r_4.pt"]


def test_arrays_of_routed_experts_survive(tmp_path):
    sample = Sample(rollout_routed_experts=np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    save_rollout_dump(str(tmp_path / "d.pt"), 0, [sample])
    [loaded] = load_rollout_dump(str(tmp_path / "d.pt"), 0)
    assert np.array_equal(loaded.rollout_routed_experts, sample.rollout_routed_experts)


def test_a_share_of_the_samples_can_be_loaded(tmp_path):
    save_rollout_dump(str(tmp_path / "d.pt"), 0, [Sample(index=i) for i in range(10)])
    assert [s.index for s in load_rollout_dump(str(tmp_path / "d.pt"), 0, subsample=0.3)] == [0, 1, 2]


def test_a_missing_dump_and_another_file_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"r_7\.pt does not exist"):
        load_rollout_dump(str(tmp_path / "r_{rollout_id}.pt"), 7)
    torch.save({"model": {}}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="not a rollout dump"):
        load_rollout_dump(str(tmp_path / "m.pt"), 0)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_dump_with_code_in_it_is_refused(tmp_path, capsys):
    torch.save({"rollout_id": 0, "samples": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read: .*UnpicklingError"):
        load_rollout_dump(str(tmp_path / "evil.pt"), 0)
    assert "must not run" not in capsys.readouterr().out
