"""The rollout in flight is part of a checkpoint; where a resumed run still differs, it is said."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.cluster.checkpoints.resume_point import read_in_flight, report_differences, write_in_flight
from slime.cluster.rollout_manager import Generated
from slime.runtime.base import Ready
from slime.utils.files.step_folders import Manifest, StepFolder

BATCH = {
    "tokens": [torch.arange(5), torch.arange(3)],
    "rollout_log_probs": [torch.tensor([-0.1, -0.2]), torch.tensor([-1e-8])],
    "rewards": [0.5, -0.5],
    "metadata": [{"row": 1, "image": np.zeros((2, 2), np.uint8)}, None],
}
GENERATED = Generated(BATCH, {"sample_offset": 8}, {"rollout/raw_reward": 0.25}, 2)


class Failed:
    def result(self, deadline_s=None):
        raise RuntimeError("the engines are gone")


def checkpoint_with(folder, future, rollout_id=4):
    def write_trainer(path):
        path.mkdir()
        write_in_flight(path.parent, rollout_id + 1, future)

    return write_checkpoint(folder, Manifest(rollout_id, "run", 5), {}, write_trainer, 0)


def test_the_batch_comes_back_bit_for_bit(tmp_path):
    checkpoint = checkpoint_with(tmp_path, Ready(GENERATED))
    found = read_in_flight(checkpoint)
    assert (found.cursor, found.metrics, found.num_samples) == (GENERATED.cursor, GENERATED.metrics, 2)
    assert all(map(torch.equal, found.batch["tokens"], BATCH["tokens"]))
    assert all(map(torch.equal, found.batch["rollout_log_probs"], BATCH["rollout_log_probs"]))
    assert found.batch["rewards"] == BATCH["rewards"] and found.batch["metadata"][1] is None
    assert "in_flight.msgpack" in checkpoint.manifest.files, "with its checksum"


def test_nothing_in_flight_leaves_nothing(tmp_path):
    assert read_in_flight(checkpoint_with(tmp_path, None)) is None


def test_a_rollout_that_fails_does_not_cost_the_checkpoint_of_the_one_before(tmp_path, caplog):
    assert read_in_flight(checkpoint_with(tmp_path, Failed())) is None
    assert "Rollout 5 failed (the engines are gone): the checkpoint is written without it" in caplog.text


def test_a_batch_that_cannot_be_stored_is_named_and_left_out(tmp_path, caplog):
    foreign = Generated({**BATCH, "metadata": [{"env": SimpleNamespace()}, None]}, None, {}, 2)
    assert read_in_flight(checkpoint_with(tmp_path, Ready(foreign))) is None
    assert "cannot hold a SimpleNamespace at ['batch']['metadata'][0]['env']" in caplog.text


def test_a_batch_of_another_rollout_is_refused(tmp_path):
    source = checkpoint_with(tmp_path / "a", Ready(GENERATED), rollout_id=3)
    target = checkpoint_with(tmp_path / "b", Ready(GENERATED), rollout_id=4)
    (target.path / "in_flight.msgpack").write_bytes((source.path / "in_flight.msgpack").read_bytes())
    with pytest.raises(ValueError, match=r"in_flight.msgpack does not belong to the rollout after"):
        read_in_flight(target)


@pytest.mark.parametrize(
    ("changes", "batch", "overlapped", "told"),
    [
        ({}, GENERATED, True, None),
        ({}, None, False, None),
        ({}, None, True, "no rollout in flight: rollout 5 starts again"),
        ({}, GENERATED, False, "the asynchronous loop was generating rollout 5"),
        (
            {"update_weights_interval": 2},
            GENERATED,
            True,
            "save at a multiple of --update-weights-interval 2",
        ),
        ({"update_weights_interval": 5}, GENERATED, True, None),
        ({"num_rollout": 5}, None, True, None),  # it was the last
        (
            {"rollout_function_path": "a.b.generate_rollout_fully_async"},
            GENERATED,
            True,
            "groups that were in flight",
        ),
    ],
)
def test_what_a_resume_cannot_repeat_is_said(tmp_path, caplog, changes, batch, overlapped, told):
    args = SimpleNamespace(
        **{
            "update_weights_interval": 1,
            "num_rollout": 9,
            "rollout_function_path": "x.generate_rollout",
            "deterministic_mode": False,
            **changes,
        }
    )
    report_differences(args, StepFolder(tmp_path, Manifest(4, "run", 5)), batch, overlapped=overlapped)
    assert told in caplog.text if told else caplog.text == ""
