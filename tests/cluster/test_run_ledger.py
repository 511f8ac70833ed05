"""What a run that goes on takes from its ledger, and what it does not."""

from types import SimpleNamespace

import pytest
from argument_helpers import parse

from slime.cluster.checkpoints.run_ledger import (
    encodable,
    find_resume,
    open_ledger,
    settings_digest,
    was_evaluated,
)
from slime.cluster.recording import Recording
from slime.cluster.rollout_manager import Generated
from slime.utils.codec import TensorRows, decode, encode
from slime.utils.machine.run_identity import Run

torch = pytest.importorskip("torch")
BATCH = {"tokens": [torch.arange(5)], "rewards": [0.5], "rollout_log_probs": [torch.tensor([-0.1, -1e-8])]}


def run_of(folder, start):
    return Run("run", folder, "shm", start)


def first_start(folder, args, rollouts=3, cursor=True):
    """A start that made some rollouts and was killed after a checkpoint of the first."""
    run = run_of(folder, 1)
    recording = Recording(run, args)
    ledger = open_ledger(args, run, recording, find_resume(args, run, -1, overlapped=True))
    for number in range(rollouts):
        ledger.begin(number, f"run:{number + 1}")
        ledger.cut(number)
        value = Generated(BATCH, {"at": number} if cursor else None, {"rollout/raw_reward": 0.25}, 2)
        ledger.made(number, encodable(value))
        ledger.trained(number)
    ledger.committed(0)
    ledger.evaluated(0)
    recording.close()


def test_the_rows_of_a_batch_are_stored_as_one_buffer_and_not_changed_later():
    batch = {"tokens": list(torch.arange(9).split([2, 0, 3, 4])), "names": ["a", "b"]}
    kept = encodable(Generated(batch, {}, {}, 4))["batch"]
    batch["tokens"][2] = torch.tensor([7])
    batch["names"].append("c")
    assert isinstance(kept["tokens"], TensorRows)
    found = decode(encode(kept))
    assert [row.tolist() for row in found["tokens"]] == [[0, 1], [], [2, 3, 4], [5, 6, 7, 8]]
    assert found["names"] == ["a", "b"]


def test_rollouts_behind_the_checkpoint_are_taken_bit_for_bit(tmp_path):
    args = parse(save=str(tmp_path / "ckpt"), run_dir=str(tmp_path))
    first_start(tmp_path, args)
    resume = find_resume(args, run_of(tmp_path, 2), 0, overlapped=True)
    assert (resume.committed, resume.last_made, list(resume.made)) == (0, 2, [1, 2])
    found = Generated(**resume.made[2])
    assert found.cursor == {"at": 2} and found.metrics == {"rollout/raw_reward": 0.25}
    for key in ("tokens", "rollout_log_probs"):
        assert all(map(torch.equal, found.batch[key], BATCH[key]))
    assert was_evaluated(run_of(tmp_path, 2), 0) and not was_evaluated(run_of(tmp_path, 2), 1)


@pytest.mark.parametrize(
    ("changes", "overlapped", "start"),
    [
        ({"rollout_temperature": 0.5}, True, 2),
        ({}, False, 2),  # the other loop: batches are of other weights
        ({}, True, 1),
        ({"ckpt_step": 0, "load": "x"}, True, 2),
    ],
)
def test_what_other_settings_made_and_what_one_goes_back_behind_is_made_anew(
    tmp_path, changes, overlapped, start
):
    (tmp_path / "x").mkdir()
    changes = {**changes, **({"load": str(tmp_path / "x")} if "load" in changes else {})}
    first_start(tmp_path, parse(save=str(tmp_path / "ckpt"), run_dir=str(tmp_path)))
    args = parse(save=str(tmp_path / "ckpt"), run_dir=str(tmp_path), **changes)
    resume = find_resume(args, run_of(tmp_path, start), 0, overlapped=overlapped)
    assert (resume.last_made, resume.made) == (0, {})


def test_more_rollouts_and_other_folders_are_the_same_settings():
    one, two = parse(save="a", num_rollout=3), parse(save="b", num_rollout=9, save_interval=4)
    assert settings_digest(one, overlapped=True) == settings_digest(two, overlapped=True)
    assert settings_digest(one, overlapped=True) != settings_digest(parse(lr=0.25), overlapped=True)


def test_a_source_that_keeps_its_own_state_goes_on_from_the_checkpoint(tmp_path):
    args = parse(save=str(tmp_path / "ckpt"), run_dir=str(tmp_path))
    first_start(tmp_path, args, cursor=False)
    assert find_resume(args, run_of(tmp_path, 2), 0, overlapped=True).made == {}


def test_without_a_record_there_is_no_ledger(tmp_path):
    args = parse(save=str(tmp_path / "ckpt"), run_dir=str(tmp_path), record_max_mib=0)
    recording = Recording(run_of(tmp_path, 1), args)
    assert open_ledger(args, run_of(tmp_path, 1), recording, SimpleNamespace()) is None
    assert was_evaluated(run_of(tmp_path, 1), 3)
