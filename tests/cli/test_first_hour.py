"""Small things that somebody new meets in the first hour: names, hints, the order of the help."""

import json
import urllib.request

import pytest
from argument_helpers import parse
from loop_helpers import flags, make_world
from page_world import serving

from slime.arguments import parse_args
from slime.cli.main import main, render_help
from slime.cluster.start import check
from slime.dashboard.run_folder import open_runs
from slime.utils.files.run_file import open_run_file, read_run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("first"))


def messages(world, kind, **changes):
    args = parse_args(flags(world, "run", **changes))
    return [str(finding) for finding in check(args, overlapped=False).of(kind)]


# -- names ---------------------------------------------------------------------------------------------------


def test_the_run_of_a_new_task_has_the_name_of_the_task(tmp_path):
    for folder, name in (("mytask/run", "mytask"), ("mytask/second", "second"), ("run", tmp_path.name)):
        (tmp_path / folder).mkdir(parents=True)
        assert open_run_file(tmp_path / folder, {}, None, None, None).name == name
        assert read_run(tmp_path / folder).name == name


def test_a_dashboard_of_several_runs_shows_all_of_them_at_first(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder in folders:
        folder.mkdir(parents=True)
        open_run_file(folder, {}, None, None, None)
    runs = open_runs(folders)
    assert list(runs) == ["a", "b"]
    with serving(*folders) as (url, _), urllib.request.urlopen(f"{url}/api/runs", timeout=60) as answer:
        assert json.load(answer)["shown"] == ["a", "b"]


# -- hints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("epochs", "num-epoch"),
        ("num-epochs", "num-epoch"),
        ("batch-size", "rollout-batch-size"),
        ("steps", "num-rollout"),
        ("learning-rate", "lr"),
    ],
)
def test_usual_names_of_flags_get_a_hint(theirs, ours, tmp_path):
    with pytest.raises(ValueError, match=f"unknown flag --{theirs}; it is called --{ours} here"):
        parse(f"--{theirs}", "3")
    (tmp_path / "run.yaml").write_text(f"{theirs.replace('-', '_')}: 3\n")
    with pytest.raises(ValueError, match=f"run.yaml: unknown key '.*'; it is called '{ours}' here"):
        parse("--config", str(tmp_path / "run.yaml"))


def test_a_nested_file_of_settings_is_told_that_keys_are_flat(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  hf_checkpoint: m\ntraining:\n  lr: 1e-6\n  rollout-batch-size: 4\n")
    with pytest.raises(ValueError) as caught:
        parse_args(["--config", str(file)])
    text = str(caught.value)
    assert "'model' contains other keys" in text and "'training'" in text and "at the left margin" in text
    assert "required" not in text
    file.write_text("optimizer:\n  lr: 1e-6\n")  # which is a flag, and not a group
    with pytest.raises(ValueError, match="expected text, found a dict"):
        parse_args(["--config", str(file)])


def test_a_key_that_takes_an_object_may_hold_one(tmp_path):
    (tmp_path / "run.yaml").write_text("apply-chat-template-kwargs: {enable_thinking: false}\n")
    args = parse("--config", str(tmp_path / "run.yaml"), "--apply-chat-template")
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}


# -- the help ------------------------------------------------------------------------------------------------


def test_the_help_lists_training_before_tools(capsys):
    text = render_help()
    places = [text.index(f"\n  {name} ") for name in ("quickstart", "doctor", "train", "status", "convert")]
    assert places == sorted(places)
    assert text.index("\n  track ") > text.index("\n  train ") < text.index("\n  migrate ")
    assert main(["--help"]) == 0 and "slime" in capsys.readouterr().out


# -- what is told before the start ---------------------------------------------------------------------------


def test_rows_with_tools_are_refused_by_a_template_without_a_place_for_them(world, tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    row = {"input": [{"role": "user", "content": "1+1?"}], "label": "2", "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = messages(world, "error", prompt_data=tmp_path / "rows.jsonl", apply_chat_template=True)
    assert any("leaves out the tool 'add'" in text for text in found), found
