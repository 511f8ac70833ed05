"""Trackers, timers and log lines: what is on disk after each report."""

import json
import logging
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from argument_helpers import declared

from slime.observability import logging_utils
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
    tracker.close()


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


@pytest.mark.parametrize(
    "flag, module, command",
    [
        ("use_wandb", "wandb", "slime[wandb]"),
        ("use_tensorboard", "torch.utils.tensorboard", "slime[tensorboard]"),
    ],
)
def test_missing_package_is_an_error_with_the_install_command(tmp_path, monkeypatch, flag, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError) as caught:
        Tracker(make_args(**{flag: True}), tmp_path / "run")
    assert command in str(caught.value)
    assert not (tmp_path / "run" / METRICS_FILE).exists()


def test_tensorboard_gets_the_numbers_when_asked(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Tracker(make_args(use_tensorboard=True, tb_project_name="proj"), tmp_path) as tracker:
        tracker.log({"train/loss": 0.25, "train/note": "text"}, "train/step", 3)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "proj"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.25)]


def test_wandb_gets_metrics_and_config_without_the_key(tmp_path, monkeypatch):
    runs = []

    class Run:
        def __init__(self, **kwargs):
            self.kwargs, self.logged, self.axes, self.finished = kwargs, [], {}, False
            runs.append(self)

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, values):
            self.logged.append(values)

        def finish(self):
            self.finished = True

    fake = SimpleNamespace(init=lambda **kwargs: Run(**kwargs), login=lambda **kwargs: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracker(make_args(use_wandb=True), tmp_path) as tracker:
        tracker.log({"train/loss": 1.0}, "train/step", 2)
    [run] = runs
    assert run.logged == [{"train/loss": 1.0, "train/step": 2}] and run.finished
    assert run.axes["perf/*"] == "rollout/step"
    assert "wandb_key" not in run.kwargs["config"] and run.kwargs["mode"] == "offline"


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
