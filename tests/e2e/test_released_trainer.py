"""`--release-train`: the trainer's processes end for each generation, and the run is the one without it."""

import pytest
from argument_helpers import parse
from loop_helpers import make_world, run_train, series

from slime.utils.files.step_folders import step_folders

SAME = ("train/loss", "train/grad_norm", "train/lr-pg_0", "rollout/raw_reward", "rollout/weight_version")


@pytest.mark.slow
def test_a_run_whose_trainer_ends_between_steps_learns_what_the_other_does(tmp_path):
    world = make_world(tmp_path)
    shared = {"deterministic_mode": True, "dtype": "float32", "lr_decay_style": "linear"}
    folders = {"update_weight_transport": "disk", "update_weight_disk_dir": world / "weights"}
    run_train(world, "stays", **shared)
    run_train(world, "leaves", **shared, **folders, release_train=True, save=world / "save")
    for name in SAME:
        assert series(world, "leaves", name) == series(world, "stays", name) != {}, name
    assert sorted(step_folders(world / "save")) == [0, 1, 2]
    started = (world / "leaves" / "logs" / "trainer-0.log").read_text().count("starts; its output follows")
    assert started == 4  # for the first push, then for each training
    assert not list((world / "weights").glob("*weights-*"))  # nothing of the run is left there


def test_what_it_needs_is_derived_or_asked_for(tmp_path):
    save = str(tmp_path / "save")
    args = parse("--release-train", "--save", save, "--colocate")
    assert (args.update_weight_transport, args.update_weight_disk_dir) == ("disk", f"{save}/weights")
    assert (args.offload_train, args.offload_rollout) == (False, True)
    for words, message in (
        ([], "restarts the trainer from checkpoints; add --save DIR"),
        (["--save", save, "--no-save-optim"], "needs the optimizer in checkpoints"),
        (["--save", save, "--update-weight-transport", "distributed"], "engines that start late; use"),
        (["--save", save, "--update-weights-interval", "2"], "pushes after every rollout"),
    ):
        with pytest.raises(ValueError, match=message):
            parse("--release-train", *words)
