"""Asynchronous runs correct tokens of older weights by default; whoever chose something else keeps it."""

import pytest
from argument_helpers import base_argv

from slime.arguments import parse_args
from slime.arguments.core.draft import ASYNCHRONOUS
from slime.arguments.rules import for_asynchronous_loop
from slime.cli.main import main

FULLY_ASYNC = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")


def parse_async(*words, **changes):
    return parse_args([*base_argv(**changes), *words], training_loop=ASYNCHRONOUS)


def test_the_asynchronous_loop_and_the_asynchronous_rollout_weight_stale_tokens():
    partial = parse_args([*base_argv(), "--partial-rollout"])
    pool = parse_args([*base_argv(), *FULLY_ASYNC])
    for args in (parse_async(), pool, partial, parse_async("--tis-clip", "3")):
        assert args.use_tis and args.sources["use_tis"].startswith("derived: ")
        assert "--no-use-tis" in args.sources["use_tis"]
    assert not parse_args(base_argv()).use_tis
    masked = ("--partial-rollout", "--mask-offpolicy-in-partial-rollout")
    assert not parse_args([*base_argv(), *masked]).use_tis


@pytest.mark.parametrize(
    "words",
    [
        ("--no-use-tis",),
        ("--use-rs",),
        ("--use-rollout-logprobs",),
        ("--keep-old-actor",),
        ("--custom-tis-function-path", "a.b", "--get-mismatch-metrics"),
        ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1"),
    ],
)
def test_a_choice_of_the_users_stays(words):
    args = parse_async(*words)
    assert not args.use_tis and not args.sources["use_tis"].startswith("derived")


def test_a_file_may_switch_it_off(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("use_tis: false\n")
    assert not parse_async("--config", str(file)).use_tis


@pytest.mark.parametrize("words", [(), ("--no-use-tis",)])
def test_settings_that_were_parsed_for_no_loop_in_particular_get_it_from_the_loop(words):
    args = for_asynchronous_loop(parse_args([*base_argv(), *words]))
    assert args == parse_async(*words)
    assert args.use_tis == (not words) and args.sources["hf_checkpoint"] == "command line"


def test_print_config_shows_the_correction_and_why(capsys):
    with pytest.raises(SystemExit):
        main(["train-async", *base_argv(), "--print-config"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("use_tis "))
    assert line.split()[1] == "True" and "derived: the asynchronous loop" in line and "--no-use-tis" in line
