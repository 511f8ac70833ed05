"""Every tracker gets the same: numbers and samples, once, under one run, whatever the model wrote."""

import contextlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.catalog.trackers import TRACKERS, chosen_trackers
from slime.cli.inspect import track
from slime.observability.trackers import services
from slime.observability.trackers.base import COLUMNS, TrackedRun
from slime.observability.trackers.follower import Follower, follow, read_progress, tracked_run
from slime.record import RECORD_FILE, Entry, RecordWriter
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.run_file import METRICS_FILE, RunRecord, Start, write_run
from slime.utils.misc import load_function
from slime.utils.types import Sample

HOSTILE = "a|b\n# head <script>\x1b[31m \u202e \ud800 " + "x" * 100_000


@pytest.fixture(params=sorted(TRACKERS))
def tracker(request, monkeypatch, tmp_path):
    """A tracker whose package is installed, with all that it keeps below this test's folder."""
    pytest.importorskip(TRACKERS[request.param].package)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if request.param == "trackio":
        for module in ("utils", "sqlite_storage", "table"):
            found = load_function(f"trackio.{module}.__name__") and __import__(f"trackio.{module}")
            for name in ("TRACKIO_DIR", "MEDIA_DIR"):
                with contextlib.suppress(AttributeError):
                    monkeypatch.setattr(getattr(found, module), name, tmp_path / "trackio")
    return request.param


def options(**changes):
    return {"tracker_samples": 3, "wandb_mode": "offline", "wandb_project": "p", **changes}


def write_lines(folder, *lines):
    with (folder / METRICS_FILE).open("a") as file:
        for number, line in lines:
            axis = next(iter(line)).split("/")[0]
            head = {"time": 1e9 + number, "run": "r1", "step_key": f"{axis}/step", "step": number}
            file.write(json.dumps({**head, f"{axis}/step": number, **line}) + "\n")


def write_samples(folder, kind, step, texts, dataset=None):
    writer = RecordWriter(folder / RECORD_FILE, "r1", 1 << 26)
    samples = tuple(
        Sample(prompt=f"ask {texts[0]}", response=text, label="4", reward=float(number), index=number)
        for number, text in enumerate(texts)
    )
    outcome = "evaluated" if kind == "eval" else "trained"
    writer.add(kind, step, [Entry(samples, outcome, None, name) for name in dataset or [None]])
    writer.close()


def send(name, folder, **changes):
    run = tracked_run(folder, options(**changes))
    follower = Follower(name, run, load_function(TRACKERS[name].service))
    assert follow(follower, lambda seconds: True), (folder / "trackers" / f"{name}.json").read_text()
    return follower.progress


def read_back(name, folder):
    """{metric: [(step, value)]} and {table: text of all that it holds} of the one run that there is."""
    return {"tensorboard": _events, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}[name](folder)


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    tables = {
        tag: "".join(e.tensor_proto.string_val[0].decode() for e in found.Tensors(tag))
        for tag in found.Tags()["tensors"]
    }
    return scalars, tables


def _wandb(folder):
    from wandb.proto import wandb_internal_pb2

    scalars, tables, ids = {}, {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _log_records(file.read_bytes()[7:], 7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            items = {tuple(i.nested_key) or (i.key,): json.loads(i.value_json) for i in record.history.item}
            step = next((value for key, value in items.items() if key[0].endswith("/step")), None)
            for (key, *part), value in items.items():
                if part == ["path"]:
                    text = json.loads((file.parent / "files" / value).read_text())
                    tables[key] = tables.get(key, "") + json.dumps(text, ensure_ascii=False)
                elif not part:
                    scalars.setdefault(key, []).append((step, value))
    assert ids == {folder.name}
    return scalars, tables


def _log_records(data, offset):
    """The records of a LevelDB log: parts in blocks of 32 KiB, each with checksum, length and place."""
    record, at = b"", 0
    while at + 7 <= len(data):
        if 32768 - (at + offset) % 32768 < 7:  # too little for a head: the block is filled with zeros
            at += 32768 - (at + offset) % 32768
            continue
        length, place = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if place in (1, 4):  # whole, or the last part
            yield record
            record = b""


def _trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    [project] = SQLiteStorage.get_projects()
    [run] = SQLiteStorage.get_runs(project)
    scalars, tables = {}, {}
    for row in SQLiteStorage.get_logs(project, run):
        for key, value in row.items():
            if isinstance(value, dict) and value.get("_type") == "trackio.table":
                tables[key] = tables.get(key, "") + json.dumps(value["_value"], ensure_ascii=False)
            elif isinstance(value, (int, float)):
                scalars.setdefault(key, []).append((row["step"], value))
    return scalars, tables


def _mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("slime").experiment_id
    [run] = client.search_runs([experiment])
    scalars = {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    tables = {}
    for kind in ("train", "eval/a", "eval/b"):
        for file in client.list_artifacts(run.info.run_id, f"samples/{kind}"):
            text = Path(client.download_artifacts(run.info.run_id, file.path)).read_text()
            tables[f"samples/{kind}"] = tables.get(f"samples/{kind}", "") + text
    return scalars, tables


def test_numbers_and_samples_arrive(tracker, tmp_path):
    write_lines(tmp_path, (0, {"rollout/raw_reward": 0.25}), (1, {"rollout/raw_reward": 0.5}))
    write_samples(tmp_path, "train", 0, ["four", "five"])
    write_samples(tmp_path, "eval", 1, ["six"], dataset=["a", "b"])
    send(tracker, tmp_path)
    scalars, tables = read_back(tracker, tmp_path)
    assert scalars["rollout/raw_reward"] == [(0, 0.25), (1, 0.5)]
    assert set(tables) == {"samples/train", "samples/eval/a", "samples/eval/b"}
    assert "ask four" in tables["samples/train"] and "five" in tables["samples/train"]
    assert all(column in tables["samples/train"] for column in COLUMNS)


def test_a_resumed_run_goes_on_with_the_same_and_sends_nothing_twice(tracker, tmp_path):
    write_lines(tmp_path, (0, {"train/loss": 3.0}))
    write_samples(tmp_path, "train", 0, ["early"])
    send(tracker, tmp_path)
    write_lines(tmp_path, (1, {"train/loss": 2.0}))
    write_samples(tmp_path, "train", 1, ["late"])
    send(tracker, tmp_path)
    scalars, tables = read_back(tracker, tmp_path)
    assert scalars["train/loss"] == [(0, 3.0), (1, 2.0)]
    text = tables["samples/train"]
    assert text.count("ask early") == text.count("ask late") == 1


def test_hostile_text_is_cleaned_and_cut(tracker, tmp_path):
    write_lines(tmp_path, (0, {"eval/gsm8k-pass@1": 0.5, "rollout/odd name": 1.0}))
    write_samples(tmp_path, "train", 0, [HOSTILE] * 9)
    assert send(tracker, tmp_path).refused == 0
    _, tables = read_back(tracker, tmp_path)
    text = tables["samples/train"]
    assert "\x1b" not in text and "\u202e" not in text and "␛" in text
    assert len(text) < 3 * 2 * 4 * 2000  # three rows, prompt and answer


def test_numbers_that_are_not_finite_and_lines_that_are_no_reports_do_no_harm(tracker, tmp_path):
    write_lines(tmp_path, (0, {"train/loss": "nan", "train/gap": "-inf", "train/note": "text"}))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write("[1]\nno json\n" + '{"step_key": "x"}\n')
    write_lines(tmp_path, (1, {"train/loss": 2.0}))
    assert send(tracker, tmp_path).refused == 0
    scalars, _ = read_back(tracker, tmp_path)
    assert scalars["train/loss"][-1] == (1, 2.0)
    assert tracker in ("wandb", "trackio", "mlflow") or math.isnan(scalars["train/loss"][0][1])
    assert "train/note" not in scalars


def test_no_samples_are_sent_when_none_are_wanted(tracker, tmp_path):
    write_lines(tmp_path, (0, {"train/loss": 3.0}))
    write_samples(tmp_path, "train", 0, ["private"])
    send(tracker, tmp_path, tracker_samples=0)
    scalars, tables = read_back(tracker, tmp_path)
    assert scalars["train/loss"] == [(0, 3.0)] and not tables


def test_every_row_has_its_flag_and_its_extra():
    import tomllib

    from slime.arguments.all_flags import all_specs

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for name, row in TRACKERS.items():
        assert {f"use_{name}", *row.options} <= set(all_specs())
        assert row.extra in extras["project"]["optional-dependencies"]
        load_function(row.service)
    assert chosen_trackers(object()) == []


# -- `slime track`


def test_a_run_is_sent_after_its_end(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    write_run(tmp_path, RunRecord("r1", "mine", Start("now", {"lr": {"value": 1.0}}, {}, {})))
    write_lines(tmp_path, (0, {"train/loss": 3.0}))
    assert track.main([str(tmp_path), "tensorboard"]) == 0
    assert "TensorBoard has the run" in capsys.readouterr().out
    assert _events(tmp_path)[0]["train/loss"] == [(0, 3.0)]


def test_what_cannot_be_sent_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    assert track.main([str(tmp_path / "none"), "tensorboard"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    write_run(tmp_path, RunRecord("r1", "mine", Start("now", {}, {}, {})))
    monkeypatch.setattr("slime.cli.inspect.track.is_installed", lambda package: False)
    assert track.main([str(tmp_path), "wandb"]) == 2
    assert "slime-rl[wandb]" in capsys.readouterr().err
    lock = FolderLock(tmp_path, "--run-dir")
    assert track.main([str(tmp_path), "wandb"]) == 2
    assert "the run is still active" in capsys.readouterr().err
    lock.release()


def test_a_service_that_refuses_is_one_line_and_its_traceback_is_in_the_log(tmp_path, capsys, monkeypatch):
    def refuse(run):
        raise RuntimeError("no key")

    write_run(tmp_path, RunRecord("r1", "mine", Start("now", {}, {}, {})))
    monkeypatch.setattr("slime.cli.inspect.track.is_installed", lambda package: True)
    monkeypatch.setattr("slime.cli.inspect.track.load_function", lambda path: refuse)
    assert track.main([str(tmp_path), "wandb"]) == 1
    log = tmp_path / "logs" / "tracker-wandb.log"
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: Weights & Biases: RuntimeError: no key (details: {log})"
    assert "Traceback" in log.read_text()


# -- what any service may do to us


def kept(folder):
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


def double(name):
    return load_function(f"tracker_doubles.{name}")


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_what_could_not_be_sent_is_sent_later(tmp_path):
    write_lines(tmp_path, (0, {"train/loss": 3.0}))
    run = tracked_run(tmp_path, options())
    assert not follow(Follower("wandb", run, double("Absent")), lambda seconds: True)
    assert "no route" in read_progress(tmp_path, "wandb").error
    assert follow(Follower("wandb", run, double("Keeping")), lambda seconds: True)
    assert [entry[1]["train/loss"] for entry in kept(tmp_path) if entry[0] == "scalars"] == [3.0]
    assert read_progress(tmp_path, "wandb").error is None


def test_a_report_that_is_refused_twice_is_left_out_and_counted(tmp_path):
    write_lines(tmp_path, (0, {"bad/name": 1.0}), (1, {"train/loss": 2.0}))
    follower = Follower("wandb", tracked_run(tmp_path, options()), double("Picky"))
    ends = iter([False, True])
    assert follow(follower, lambda seconds: next(ends))
    assert follower.progress.refused == 1
    assert [entry[1]["train/loss"] for entry in kept(tmp_path) if entry[0] == "scalars"] == [2.0]


def test_a_line_that_is_being_written_waits(tmp_path):
    write_lines(tmp_path, (0, {"train/loss": 3.0}))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step_key": "train/step", "step": 1, "train/loss": 2')
    follower = Follower("wandb", tracked_run(tmp_path, options()), double("Keeping"))
    assert follower.step() and not follower.step()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(".5}\n")
    assert follower.step()
    assert [entry[1]["train/loss"] for entry in kept(tmp_path) if entry[0] == "scalars"] == [3.0, 2.5]


def test_rollouts_may_stand_at_the_optimizer_steps_before_them(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *a, **k: None)
    double = SimpleNamespace(init=lambda **_: run, Table=list, teardown=None, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", double)
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 16}
    chosen = options(wandb_always_use_train_step=True)
    service = services.WandB(TrackedRun("id", "run", tmp_path, chosen, sizes))
    service.scalars({"a": 1.0}, "rollout/step", 3, 0.0)
    service.scalars({"b": 1.0}, "train/step", 7, 0.0)
    assert logged == [{"a": 1.0, "rollout/step": 6}, {"b": 1.0, "train/step": 7}]
