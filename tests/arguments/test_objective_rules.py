"""Flags of critic, distillation and pairs: what each needs is named before anything starts."""

import pytest
from argument_helpers import parse

from slime.utils.files.step_folders import Manifest


def test_the_critic_has_flags_of_its_own_only_where_there_is_one():
    args = parse("--advantage-estimator", "ppo", "--critic-lr", "1e-5", "--num-critic-only-steps", "3")
    assert args.critic_lr == 1e-5 and args.num_critic_only_steps == 3
    with pytest.raises(
        ValueError, match=r"--critic-lr is 1e-05, but it has an effect only with --advantage-estimator ppo"
    ):
        parse("--critic-lr", "1e-5")


@pytest.mark.parametrize("name, meant", [("sglang", "engine"), ("megatron", "trainer"), ("engine", "engine")])
def test_a_teacher_may_go_by_either_name(name, meant, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    teacher = ("--opd-teacher-load", str(tmp_path)) if meant == "trainer" else ()
    assert parse("--use-opd", "--opd-type", name, *teacher).opd_type == meant


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--use-opd",), "--use-opd needs --opd-type"),
        (("--use-opd", "--opd-type", "trainer"), "--opd-type trainer needs --opd-teacher-load"),
        (
            ("--use-opd", "--opd-type", "engine", "--opd-kl", "full"),
            "--opd-kl full needs the teacher's whole distribution",
        ),
        (
            ("--use-opd", "--opd-type", "trainer", "--opd-teacher-load", "a/b", "--opd-kl", "reverse_top_k"),
            "--opd-kl reverse_top_k is for a teacher on an engine",
        ),
        (("--use-opd", "--opd-type", "engine", "--opd-top-k", "4"), "--opd-top-k is 4, .* --opd-kl"),
        (("--opd-kl-coef", "2"), "--opd-kl-coef is 2.0, but it has an effect only with --use-opd"),
        (("--dpo-beta", "0.3"), "--dpo-beta is 0.3, but it has an effect only with --loss-type dpo_loss"),
        (
            ("--ref-load", "owner/other"),
            "--ref-load is owner/other, but it has an effect only with --use-kl-loss",
        ),
        (
            ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--rollout-temperature", "0.6"),
            "a supervised loss is that of the model as it is",
        ),
        (
            ("--ref-update-interval", "3"),
            "--ref-update-interval is 3, but it has an effect only with --use-kl-loss",
        ),
        (("--loss-type", "rm_loss", "--n-samples-per-prompt", "1"), "add --debug-train-only"),
        (("--loss-type", "dpo_loss", "--n-samples-per-prompt", "4"), "a row is one pair; use 1"),
        (
            ("--loss-type", "dpo_loss", "--n-samples-per-prompt", "1", "--calculate-per-token-loss"),
            "only without --loss-type dpo_loss or rm_loss",
        ),
    ],
)
def test_what_is_missing_or_meaningless_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(*flags)


def test_dpo_takes_its_reference_from_the_model():
    args = parse("--loss-type", "dpo_loss", "--n-samples-per-prompt", "1")
    assert args.ref_load == args.hf_checkpoint


def checkpoints_in(folder, *steps):
    for step in steps:
        trainer = folder / f"step_{step:07d}" / "trainer"
        trainer.mkdir(parents=True)
        (trainer / "trainer.json").write_text("{}")
        (trainer.parent / "manifest.json").write_text(Manifest(step, "run", 1).to_json())
    return str(folder)


@pytest.mark.parametrize("flags, step", [((), 12), (("--ref-ckpt-step", "3"), 3)])
def test_a_reference_may_be_one_of_a_folder_of_checkpoints(flags, step, tmp_path):
    args = parse("--use-kl-loss", "--ref-load", checkpoints_in(tmp_path, 3, 12), *flags)
    assert args.ref_load == str(tmp_path / f"step_{step:07d}" / "trainer")


def test_so_may_a_teacher(tmp_path):
    teacher = ("--use-opd", "--opd-type", "trainer", "--opd-teacher-load", checkpoints_in(tmp_path, 3, 12))
    args = parse(*teacher, "--opd-teacher-ckpt-step", "3")
    assert args.opd_teacher_load == str(tmp_path / "step_0000003" / "trainer")


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ("--ref-ckpt-step", "4", "--ref-load", "FOLDER"),
            "--ref-ckpt-step is 4: .* has checkpoints of rollouts 3, 12",
        ),
        (("--ref-ckpt-step", "3"), "--ref-load owner/model holds no checkpoints"),
        (("--opd-teacher-ckpt-step", "3"), "--opd-teacher-load is not set"),
        (
            ("--ref-load", "FOLDER", "--save", "FOLDER", "--save-interval", "1"),
            "choose one with --ref-ckpt-step",
        ),
        (("--ref-load", "FOLDER", "--train-backend", "megatron"), "that --save-hf wrote"),
    ],
)
def test_a_checkpoint_that_cannot_be_a_kept_model_is_named(flags, message, tmp_path):
    folder = checkpoints_in(tmp_path, 3, 12)
    with pytest.raises(ValueError, match=message):
        parse("--use-kl-loss", *(folder if word == "FOLDER" else word for word in flags))
