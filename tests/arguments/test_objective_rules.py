"""Flags of critic, distillation and pairs: what each needs is named before anything starts."""

import pytest
from argument_helpers import parse


def test_the_critic_has_flags_of_its_own_only_where_there_is_one():
    args = parse("--advantage-estimator", "ppo", "--critic-lr", "1e-5", "--num-critic-only-steps", "3")
    assert args.critic_lr == 1e-5 and args.num_critic_only_steps == 3
    with pytest.raises(ValueError, match=r"--critic-lr is 1e-05, but there is no critic"):
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
        (("--opd-kl-coef", "2"), "--opd-kl-coef is 2.0, but there is no distillation"),
        (("--dpo-beta", "0.3"), "--dpo-beta is 0.3, but only --loss-type dpo_loss"),
        (("--ref-update-interval", "3"), "--ref-update-interval is 3, but there is no reference"),
        (("--loss-type", "rm_loss", "--n-samples-per-prompt", "1"), "add --debug-train-only"),
        (("--loss-type", "dpo_loss", "--n-samples-per-prompt", "4"), "a row is one pair; use 1"),
        (
            ("--loss-type", "dpo_loss", "--n-samples-per-prompt", "1", "--calculate-per-token-loss"),
            "a preference loss counts pairs, not tokens",
        ),
    ],
)
def test_what_is_missing_or_meaningless_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(*flags)


def test_dpo_takes_its_reference_from_the_model():
    args = parse("--loss-type", "dpo_loss", "--n-samples-per-prompt", "1")
    assert args.ref_load == args.hf_checkpoint
