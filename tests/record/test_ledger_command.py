"""`slime ledger`: audit, show and replay say what they found, and end accordingly."""

import json
import sqlite3

import pytest
from ledger_world import MIB, World, full_disk, group_of

from slime.cli.inspect import ledger as command
from slime.cli.inspect import replay
from slime.record import RecordError, RecordWriter, open_record
from slime.record.additions import Advantage, write_advantages
from slime.record.audit import audit
from slime.rollout.dumps import load_rollout_dump
from slime.utils.files.run_file import Resumption, RunRecord, Start, open_run_file, read_run, write_run


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.stop()


def test_an_audit_as_json_is_json(world, capsys):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.stop()
    assert command.main(["audit", str(world.path.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"kept": 1} and found["violations"] == [] and found["num_samples"] == 2


def test_what_a_full_disk_took_from_the_ledger_is_told_once_and_missing_samples_are_no_loss(world, capsys):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.writer.flush()
    world.writer._write = full_disk  # the samples of step 1: its events are there
    world.step(1, [group_of(1)], commit=True)
    world.make(2, [group_of(2)])
    world.writer.flush()
    world.writer._write_notes = full_disk  # that step 2 was trained
    world.ledger.trained(2)
    world.start(committed=2, last_made=2)
    world.step(3, [group_of(3)], commit=True)
    world.step(4, [group_of(4)], commit=True)
    found = world.audit()
    assert found.unrecorded == [1, 2] and len(found.violations) == 2
    assert "1 events could not be written" in found.violations[0]
    assert "start 2 resumed from the checkpoint after step 2" in found.violations[1]
    assert "does not say that steps [2] were trained" in found.violations[1]
    assert command.main(["audit", str(world.path.parent)]) == 1
    assert "samples of steps [1, 2] are missing" in capsys.readouterr().out


def test_the_command_says_what_it_found_and_ends_accordingly(world, capsys, tmp_path):
    world.start()
    world.step(0, [group_of(0)])
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "conserved: every group has one outcome" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "1"]) == 0
    assert "tokens    [5, 6, 7]" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "9"]) == 2
    assert "step 0 has no sample 9; it has 0 to 1." in capsys.readouterr().err
    for step in ("4", "-1", str(1 << 70), str(-(1 << 70))):
        assert command.main(["show", str(tmp_path), "--step", step]) == 2
        assert f"there is no step {step}; it has 0 to 0." in capsys.readouterr().err
    assert command.main(["audit", str(world.path)]) == 2
    assert "record.db is a file; give the folder of a run." in capsys.readouterr().err
    world.start()
    world.ledger.trained(0)
    world.ledger.trained(0)
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 1
    assert "VIOLATION: step 0 was trained twice" in capsys.readouterr().out
    assert command.main(["audit", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("words", [["audit"], ["show", "--step", "0"], ["replay", "--step", "0"]])
def test_a_folder_that_holds_runs_is_told_with_their_names(tmp_path, capsys, words):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert command.main([*words, str(tmp_path)]) == 2
    shown = capsys.readouterr()
    if words == ["audit"]:
        assert shown.out == f"{tmp_path / 'one'}:\n{tmp_path / 'two'}:\n" and shown.err.count("error: ") == 2
    else:
        assert f"In it are the runs {tmp_path / 'one'}, {tmp_path / 'two'}." in shown.err


def test_an_audit_of_a_folder_of_runs_is_one_of_each(tmp_path, capsys):
    for name in ("runs/good", "runs/deeper/bad"):
        (tmp_path / name).mkdir(parents=True)
        made = World(tmp_path / name)
        write_run(tmp_path / name, RunRecord("run", "run", Start("now", {}, {}, {})))
        made.start()
        made.step(0, [group_of(0)])
        if name == "runs/deeper/bad":
            made.ledger.trained(0)
        made.stop()
    assert command.main(["audit", str(tmp_path / "runs")]) == 1
    good, bad = capsys.readouterr().out.split(f"{tmp_path}/runs/good:\n")[::-1]
    assert "conserved" in good and bad.startswith(f"{tmp_path}/runs/deeper/bad:\n") and "VIOLATION" in bad
    assert command.main(["audit", str(tmp_path / "runs"), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["run"] for line in lines] == [f"{tmp_path}/runs/deeper/bad", f"{tmp_path}/runs/good"]


@pytest.mark.parametrize("left", ["no record", "an empty file", "a file without tables"])
def test_a_run_that_was_killed_before_its_first_rollout_has_lost_nothing(tmp_path, capsys, left):
    open_run_file(tmp_path, {}, str(tmp_path / "ckpt"), None, None)
    if left == "an empty file":
        (tmp_path / "record.db").touch()
    elif left == "a file without tables":
        connection = sqlite3.connect(tmp_path / "record.db")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "there was no rollout yet" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert command.main(["audit", str(tmp_path)]) == 2, "it has logged a step: its record is lost"


def test_a_replay_offers_steps_that_were_made_and_whose_weights_are_there(world, tmp_path, capsys):
    run = open_run_file(tmp_path, {}, str(tmp_path / "ckpt"), None, None)
    assert run.num_starts == 1
    world.start()
    for step in range(3):
        world.step(step, [group_of(step)])
    world.stop()
    for step in (1, 2):
        (tmp_path / "ckpt" / f"step_{step:07d}").mkdir(parents=True)
    assert command.main(["replay", str(tmp_path), "--step", "3"]) == 2
    assert "there is no step 3; it has 0 to 2." in capsys.readouterr().err
    assert command.main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "Steps that can be replayed: [0, 2] (" in capsys.readouterr().err


def test_a_replay_gets_pairs_and_siblings_as_they_were(world, tmp_path):
    world.start()
    world.make(0, [group_of(0, rollout_id=6), group_of(1)])
    world.stop()
    with open_record(tmp_path) as record:
        replay._write_dump(record, 0, str(tmp_path / "{rollout_id}.pt"))
    found = load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0)
    assert [(s.group_index, s.rollout_id) for s in found] == [(0, 6), (0, 6), (1, None), (1, None)]
    assert found[0].tokens == [5, 6, 7] and found[0].rollout_log_probs == pytest.approx([-0.1, -0.25])


def test_a_run_that_was_killed_before_its_first_event_has_lost_nothing(tmp_path, capsys):
    RecordWriter(tmp_path / "record.db", "run", MIB).close()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "the ledger is empty: there was no rollout yet" in capsys.readouterr().out
    assert audit(tmp_path / "record.db", finished=True).violations


def test_a_replay_takes_the_settings_of_the_start_that_trained_the_step(world, tmp_path):
    for lr in (1, 2):
        settings = {"lr": {"value": lr, "source": "command line"}}
        open_run_file(
            tmp_path, settings, str(tmp_path / "ckpt"), Resumption(str(tmp_path / "ckpt"), None), None
        )
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.make(1, [group_of(1)])
    world.start(committed=0, last_made=1)
    world.ledger.trained(1)
    world.make(2, [group_of(2)])
    world.stop()
    run = read_run(tmp_path)
    assert [replay._start_of(tmp_path, run, step).settings["lr"]["value"] for step in (0, 1)] == [1, 2]
    with pytest.raises(RecordError, match="step 2 was generated and never trained"):
        replay._start_of(tmp_path, run, 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"advantage_estimator": "remax"}, "--advantage-estimator remax compares with greedy responses"),
        ({"rollout_top_p": 0.9}, "the token ids kept by --rollout-top-p"),
        ({"use_opd": True, "opd_type": "engine"}, "log-probs of a teacher"),
        ({"use_rollout_routing_replay": True}, "the experts that engines chose"),
        ({"multimodal_keys": {"image": "images"}}, "pictures"),
        ({"turn_discount": 1.0}, "rewards of single turns"),
    ],
)
def test_a_replay_says_what_it_lacks_in_one_line(settings, told):
    why = replay._why_not(settings)
    assert why is not None and told in why and why.endswith("not recorded.")


def test_steps_with_nothing_that_is_not_recorded_are_replayed():
    assert replay._why_not({}) is None
    assert replay._why_not({"rollout_top_p": 0.9, "allow_sampling_mismatch": True}) is None
    assert replay._why_not({"use_opd": True, "opd_type": "trainer", "advantage_estimator": "ppo"}) is None


def test_a_replay_begins_with_the_weights_that_the_start_loaded(tmp_path):
    loaded = tmp_path / "other" / "step_0000007"
    loaded.mkdir(parents=True)
    resumed = {"checkpoint": str(loaded), "run": "other", "rollout": 7}

    def flags_of(step, **settings):
        entries = {name: {"value": value, "source": None} for name, value in settings.items()}
        start = Start(
            "now", entries, {}, {}, str(tmp_path / "ckpt"), None if settings.get("anew") else resumed
        )
        return replay._weights_before(RunRecord("run", "run", start), start, step, {0, 8})

    load = ["--load", str(tmp_path / "other"), "--ckpt-step", "7"]
    assert flags_of(8) == load
    assert flags_of(0, finetune=True) == [*load, "--finetune", "--start-rollout-id", "0"]
    assert flags_of(0, anew=True) == [] and flags_of(4, anew=True, start_rollout_id=4)[-1] == "4"
    with pytest.raises(RecordError, match="step 0 started from the weights"):
        flags_of(0)


def test_advantages_of_single_answers_are_compared(world, tmp_path, capsys):
    world.start()
    world.step(0, [group_of(0)])
    world.writer.submit(
        "advantages", lambda c: write_advantages(c, 0, [Advantage(0, -1.0), Advantage(1, 1.0)])
    )
    world.stop()
    with open_record(tmp_path) as record:
        logged = replay._advantages(record, 0)
    assert {index: found.value for index, found in logged.items()} == {0: -1.0, 1: 1.0}
    assert replay._compare_advantages(logged, dict(logged), 1e-3, 1e-4) == 0
    assert replay._compare_advantages(logged, {**logged, 1: Advantage(1, 1.01)}, 1e-3, 1e-4) == 1
    assert capsys.readouterr().out.splitlines() == [
        "same     advantages of 2 samples",
        "DIFFERS  advantages of 2 samples, of samples [1]",
    ]
