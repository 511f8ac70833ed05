"""`slime trace`: a file that Perfetto reads."""

import json

import pytest
from page_world import make_run

from slime.cli.main import main


def test_the_file_has_a_process_for_each_lane_and_no_overlap_in_a_thread(tmp_path, capsys):
    make_run(tmp_path / "run", 3)
    assert main(["trace", str(tmp_path / "run"), "--steps", "1-2"]) == 0
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"loop", "engine-0", "engine-1", "push", "trainer-0", "waits: rollout"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * 10 and {span["args"]["step"] for span in spans} == {1, 2}
    for a in spans:
        for b in spans:
            if a is not b and (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
                assert a["ts"] + a["dur"] <= b["ts"] + 2 or b["ts"] + b["dur"] <= a["ts"] + 2
    assert "perfetto" in capsys.readouterr().out


def test_a_run_without_spans_says_why(tmp_path, capsys):
    make_run(tmp_path / "run", 0)
    assert main(["trace", str(tmp_path / "run")]) == 2
    assert "has no spans" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing")]) == 2


def test_a_folder_of_several_runs_names_them(tmp_path, capsys):
    for name in ("rl", "sft"):
        make_run(tmp_path / name, 1)
    assert main(["trace", str(tmp_path)]) == 2
    assert f"In it are the runs {tmp_path / 'rl'}, {tmp_path / 'sft'}." in capsys.readouterr().err


def test_steps_that_are_not_there_are_reported(tmp_path, capsys):
    make_run(tmp_path / "run", 2)
    run = str(tmp_path / "run")
    for steps in ("5-1", "9" * 30):
        with pytest.raises(SystemExit):
            main(["trace", run, "--steps", steps])
        assert f"'{steps}' contains no step" in capsys.readouterr().err
    assert main(["trace", run, "--steps", "7"]) == 2
    assert "has no spans of these steps" in capsys.readouterr().err
