"""Trackers, timers and log lines: what is on disk after each report."""

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from argument_helpers import declared
from patience import eventually

from slime.catalog.trackers import TRACKERS
from slime.observability import logging_utils
from slime.observability.trackers import feed
from slime.observability.trackers.follower import read_progress
from slime.observability.tracking import METRICS_FILE, Tracker, read_metrics


def make_args(**changes):
    return declared(**{"wandb_key": "secret", "wandb_project": "p", "wandb_mode": "offline", **changes})


def test_each_report_is_one_json_line_on_disk_with_step_and_time(tmp_path):
    tracker = Tracker(make_args(), tmp_path / "run")
    before = time.time()
    tracker.log({"rollout/raw_reward": torch.tensor(0.5), "rollout/n": np.int64(3)}, "rollout/step", 7)
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()  # before the tracker is closed
    [line] = map(json.loads, lines)
    assert before <= line.pop("time") <= time.time()
    assert line == {
        "step_key": "rollout/step",
        "step": 7,
        "rollout/step": 7,
        "rollout/raw_reward": 0.5,
        "rollout/n": 3,
    }
    tracker.finish()


def test_step_may_stand_in_the_metrics(tmp_path):
    with Tracker(make_args(), tmp_path) as tracker:
        tracker.log({"train/step": 4, "train/loss": 1.0}, "train/step")
        with pytest.raises(ValueError, match="eval/step"):
            tracker.log({"eval/x": 1.0}, "eval/step")
    assert [line["step"] for line in read_metrics(tmp_path)] == [4]


def test_nan_stays_visible_in_valid_json(tmp_path):
    with Tracker(make_args(), tmp_path) as tracker:
        tracker.log({"train/loss": float("nan"), "train/gap": float("inf")}, "train/step", 0)
    text = (tmp_path / METRICS_FILE).read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (line["train/loss"], line["train/gap"]) == ("nan", "inf")


def test_value_that_is_no_number_is_refused_by_name(tmp_path):
    with Tracker(make_args(), tmp_path) as tracker:
        with pytest.raises(ValueError, match="train/odd"):
            tracker.log({"train/odd": object()}, "train/step", 0)
        with pytest.raises(ValueError, match="several elements"):
            tracker.log({"train/vector": torch.zeros(2)}, "train/step", 0)
    assert read_metrics(tmp_path) == []


def test_resumed_run_appends_after_cutting_a_torn_line(tmp_path):
    with Tracker(make_args(), tmp_path) as tracker:
        tracker.log({"a": 1}, "train/step", 0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"time": 17, "tra')
    with Tracker(make_args(), tmp_path) as tracker:
        tracker.log({"a": 2}, "train/step", 1)
    assert [line["a"] for line in read_metrics(tmp_path)] == [1, 2]


def test_threads_and_trackers_may_write_together(tmp_path):
    trackers = [Tracker(make_args(), tmp_path) for _ in range(2)]

    def report(tracker, offset):
        for i in range(50):
            tracker.log({"x" * 200: i}, "train/step", offset + i)

    threads = [threading.Thread(target=report, args=(trackers[i % 2], 50 * i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["step"] for line in read_metrics(tmp_path)) == list(range(200))


def test_finished_tracker_refuses_more_and_may_be_finished_again(tmp_path):
    tracker = Tracker(make_args(), tmp_path)
    tracker.finish()
    tracker.finish()
    with pytest.raises(ValueError, match="finished"):
        tracker.log({"a": 1}, "train/step", 0)


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_missing_package_is_an_error_with_the_install_command(tmp_path, monkeypatch, name):
    monkeypatch.setattr("slime.observability.tracking.is_installed", lambda package: False)
    with pytest.raises(ValueError, match=rf"--use-{name} .*slime-rl\[{name}\]"):
        Tracker(make_args(**{f"use_{name}": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def service(monkeypatch):
    """`service("Hanging")` stands in for the TensorBoard service, also in the tracker's own process."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("slime.observability.tracking.is_installed", lambda package: True)

    def choose(name):
        row = replace(TRACKERS["tensorboard"], service=f"tracker_doubles.{name}")
        monkeypatch.setitem(TRACKERS, "tensorboard", row)
        return make_args(use_tensorboard=True, limits={"tracker-samples": 2})

    return choose


def kept(folder):
    file = folder / "kept.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_tracker_gets_everything_before_the_run_ends(tmp_path, service, caplog):
    with Tracker(service("Keeping"), tmp_path) as tracker:
        for step in range(3):
            tracker.log({"train/loss": step / 2, "train/note": "text"}, "train/step", step)
        logging_utils.init_tracking(make_args(run_dir=str(tmp_path), use_tensorboard=False))
        logging_utils.log(make_args(run_dir=str(tmp_path)), {"mine/x": 7}, "mine/step", 0)  # of a plug-in
        logging_utils.finish_tracking()
    numbers = [entry[1] for entry in kept(tmp_path) if entry[0] == "scalars"]
    assert [values.get("train/loss") for values in numbers] == [0.0, 0.5, 1.0, None]
    assert numbers[-1]["mine/x"] == 7
    assert kept(tmp_path)[-1] == ["finish"]
    assert not caplog.records


def test_a_tracker_out_of_reach_is_told_once_and_stops_nothing(tmp_path, service, caplog, monkeypatch):
    monkeypatch.setattr(feed, "_CHECK_S", 0.0)
    with Tracker(service("Absent"), tmp_path) as tracker:
        tracker.log({"train/loss": 1.0}, "train/step", 0)
        eventually(lambda: read_progress(tmp_path, "tensorboard").error)
        for step in range(1, 4):
            tracker.log({"train/loss": 1.0}, "train/step", step)
    [record] = caplog.records
    assert "no route to the tracker" in record.getMessage() and "slime track" in record.getMessage()
    assert len(read_metrics(tmp_path)) == 4
    assert "ConnectionError" in (tmp_path / "logs" / "tracker-tensorboard.log").read_text()


def test_a_tracker_that_hangs_is_ended_with_the_run(tmp_path, service, caplog, monkeypatch):
    monkeypatch.setattr(feed, "_END_S", 0.2)
    with Tracker(service("Hanging"), tmp_path) as tracker:
        tracker.log({"train/loss": 1.0}, "train/step", 0)
        eventually(lambda: ["hangs"] in kept(tmp_path))
        tracker.log({"train/loss": 1.0}, "train/step", 1)
        process = tracker._feeds[0]._process
    assert process.poll() is not None
    [record] = caplog.records
    assert "did not accept the rest" in record.getMessage()


def test_module_level_log_opens_one_tracker_per_process(tmp_path):
    args = make_args(run_dir=str(tmp_path))
    assert logging_utils.init_tracking(args) is logging_utils.init_tracking(args)
    logging_utils.log(args, {"rollout/step": 1, "rollout/x": 2.0}, step_key="rollout/step")
    logging_utils.finish_tracking(args)
    logging_utils.finish_tracking(args)
    assert [line["rollout/x"] for line in read_metrics(tmp_path)] == [2.0]


def test_logger_is_configured_once_with_the_latest_prefix(capsys):
    root = logging.getLogger()
    before = list(root.handlers)
    level = root.level
    try:
        logging_utils.configure_logger(" rank 0")
        logging_utils.configure_logger(" rank 1")
        logging.getLogger("slime.test").info("hello")
        lines = [line for line in capsys.readouterr().err.splitlines() if "hello" in line]
        assert len(lines) == 1 and "rank 1]" in lines[0]
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_damaged_lines_are_passed_over(tmp_path):
    (tmp_path / METRICS_FILE).write_text('no json\n[1]\n\n{"a": 1}\n{"a": 2')
    assert read_metrics(tmp_path) == [{"a": 1}]
