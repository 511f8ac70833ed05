"""Deadlines share --timeouts NAME=SECONDS,...; flags of other releases feed the same table."""

import pytest
import yaml
from argument_helpers import parse

from slime.arguments.core.removed import REMOVED_FLAGS
from slime.catalog.deadlines import DEADLINES, timeout_s


def test_a_deadline_that_is_not_given_has_its_default():
    args = parse("--timeouts", "hang=60,engine_start=900")
    assert timeout_s(args, "hang") == 60 and timeout_s(args, "engine-start") == 900
    assert timeout_s(args, "host") == DEADLINES["host"].default


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hnag=60", "there is no 'hnag'; did you mean hang"),
        ("zzz=1", "there is no 'zzz'; choose from generate, custom-generate"),
        ("hang=soon", "hang: expected a number"),
        ("hang", "hang: expected a number"),
        ("host=0", "host: must be greater than 0"),
        ("hang=1,hang=2", "hang is given twice"),
    ],
)
def test_a_mistake_names_the_deadline_and_what_was_meant(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse("--timeouts", text)


def test_the_command_line_adds_to_the_deadlines_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"timeouts": {"hang": 60, "host": 30}}))
    args = parse("--config", str(file), "--timeouts", "host=5")
    assert args.timeouts == {"hang": 60.0, "host": 5.0}


def test_flags_of_other_releases_set_the_same_deadlines():
    args = parse("--distributed-timeout-minutes", "20")
    assert timeout_s(args, "collective") == 1200
    assert timeout_s(args, "collective") == 1200
    args = parse("--distributed-timeout-minutes=20", "--timeouts", "hang=60")
    assert args.timeouts == {"collective": 1200.0, "hang": 60.0}
    with pytest.raises(ValueError, match="collective: expected a number"):
        parse("--distributed-timeout-minutes", "soon")


def test_a_former_flag_names_the_deadline_that_replaces_it(tmp_path):
    with pytest.raises(ValueError, match="--hang-timeout-s: give it as --timeouts hang=SECONDS"):
        parse("--hang-timeout-s", "3")
    file = tmp_path / "run.yaml"
    file.write_text("hang_timeout_s: 3\n")
    with pytest.raises(ValueError, match="give it as --timeouts hang=SECONDS"):
        parse("--config", str(file))


def test_every_deadline_that_a_removed_flag_names_exists():
    named = [text.split()[4].split("=")[0] for text in REMOVED_FLAGS.values() if "--timeouts" in text]
    assert named and set(named) <= set(DEADLINES)
