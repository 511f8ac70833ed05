"""The file of what the processes of a run use, which the dashboard draws."""

import json
import types

from patience import eventually

from slime.cluster.system_curves import SYSTEM_FILE, SystemCurves
from slime.liveness import usage
from slime.liveness.notes import Notes


def test_readings_of_the_driver_and_all_workers_are_written_over_time(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "INTERVAL_S", 0.01)
    worker = Notes(usage={"trainer-0": {"cpu_cores": 0.5, "memory_gib": 2.0}})
    curves = SystemCurves(tmp_path, types.SimpleNamespace(notes=lambda: {"trainer-0": worker}))
    file = tmp_path / SYSTEM_FILE
    eventually(lambda: file.is_file() and len(file.read_text().splitlines()) > 1)
    curves.close()
    row = json.loads(file.read_text().splitlines()[-1])
    assert row["step_key"] == "system/time" and row["step"] == int(row["time"])
    assert row["system/trainer-0/cpu_cores"] == 0.5 and row["system/driver/memory_gib"] > 0


def test_a_folder_that_cannot_be_written_costs_only_the_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "INTERVAL_S", 0.01)
    calls = []
    runtime = types.SimpleNamespace(notes=lambda: calls.append(1) or {})
    curves = SystemCurves(tmp_path / "missing", runtime)
    eventually(lambda: len(calls) > 2)
    curves.close()
    assert not (tmp_path / "missing").exists()
