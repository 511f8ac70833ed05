"""Which seed decides what: `--seed` seeds the whole run, `--rollout-seed` sampling and data order."""

import pytest
from argument_helpers import parse

from slime.arguments import Args
from slime.utils.files.run_file import RunRecord, Start, write_run


def seeds(args: Args) -> tuple[int, int]:
    return args.seed, args.rollout_seed


def test_sampling_and_data_order_follow_the_seed_unless_they_have_their_own():
    assert seeds(parse()) == (1234, 42), "the numbers of runs without a seed stay what they were"
    assert seeds(parse("--seed", "7")) == (7, 7)
    assert seeds(parse("--seed", "1234")) == (1234, 1234), "given is given, also where it is the default"
    assert seeds(parse("--rollout-seed", "7")) == (1234, 7)
    assert seeds(parse("--seed", "7", "--rollout-seed", "42")) == (7, 42)


def test_a_config_file_seeds_the_run_as_the_command_line_does(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 7\n")
    args = parse("--config", str(tmp_path / "run.yaml"))
    assert seeds(args) == (7, 7)
    assert args.sources["rollout_seed"] == "derived: same as seed"


@pytest.mark.parametrize("load", [True, False], ids=["by --load", "by the same command"])
@pytest.mark.parametrize("source, kept", [("default", 42), ("derived: same as seed", 7)])
def test_a_run_that_is_resumed_keeps_the_rollout_seed_it_had(tmp_path, load, source, kept):
    """An earlier version ignored --seed here: its run would go through the data in another order now."""
    run, save = tmp_path / "run", tmp_path / "save"
    run.mkdir(), save.mkdir()
    words = ["--seed", "7", "--run-dir", str(run), "--save", str(save), *(["--load", str(save)] * load)]
    settings = {
        name: {"value": value, "source": "command line"} for name, value in parse(*words).to_dict().items()
    }
    settings["rollout_seed"] = {"value": kept, "source": source}
    write_run(run, RunRecord("1234abcd", "run", Start("now", settings, {}, {}, checkpoints=str(save))))
    args = parse(*words)
    assert seeds(args) == (7, kept)
    assert args.load == str(save), "it is the same run"
    assert seeds(parse(*words, "--rollout-seed", "3")) == (7, 3)
