"""Actions on a real run: asked for while it goes on, done between two steps, answered in the record."""

import json

import pytest
from loop_helpers import make_world, metrics, series, start_train, wait_for
from patience import PATIENCE_S, eventually

from slime.dashboard import sample_pages
from slime.dashboard.run_folder import open_runs
from slime.record import Select, open_record
from slime.record.actions import ask
from slime.record.additions import read_advantage
from slime.utils.files.step_folders import step_path

pytestmark = pytest.mark.slow  # real runs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("actions"))


def rows_of(folder):
    [run] = open_runs([folder]).values()
    return {row["name"]: row for row in run.record_facts()["actions"]}


def answered(folder, name):
    return lambda: (row := rows_of(folder).get(name)) and row["state"] != "asked" and row


def test_a_run_takes_a_rate_a_clip_a_temperature_a_pause_and_a_stop(world):
    folder = world / "run"
    process = start_train(
        world, "run", num_rollout=400, save=world / "saved", save_interval=1000, eval_interval=None
    )
    try:
        wait_for(lambda: metrics(world, "run"), process)
        wait_for(lambda: (folder / "record.db").exists() and series(world, "run", "perf/step_time"), process)
        ask(folder, "pause", None, "test")
        wait_for(answered(folder, "pause"), process)
        ask(folder, "lr", 5e-4, "test")
        ask(folder, "clip", 0.3, "test")
        ask(folder, "temperature", 0.7, "test")
        ask(folder, "evaluate", None, "test")
        assert "nothing to evaluate" in wait_for(answered(folder, "evaluate"), process)["reply"]
        changed = wait_for(answered(folder, "temperature"), process)
        assert changed["state"] == "done" and rows_of(folder)["lr"]["reply"].startswith("--lr was 0.001")
        before = max(series(world, "run", "perf/step_time"))
        ask(folder, "resume", None, "test")
        wait_for(lambda: max(series(world, "run", "train/loss")) > before + 1, process)
        ask(folder, "checkpoint", None, "test")
        saved = wait_for(answered(folder, "checkpoint"), process)
        assert saved["state"] == "done"
        ask(folder, "stop", None, "test")
        assert process.wait(PATIENCE_S) == 0, (world / "run.out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    rates = series(world, "run", "train/lr-pg_0")
    assert rates[0] == pytest.approx(1e-3) and rates[max(rates)] == pytest.approx(5e-4)
    # The trainer reads log-probs at the temperature that the engine sampled with.
    differences = series(world, "run", "train/train_rollout_logprob_abs_diff")
    assert max(differences.values()) < 1e-3
    assert json.loads((folder / "run.json").read_text())["exit"].startswith("stopped after step")
    assert step_path(world / "saved", saved["rollout_id"]).is_dir()
    _check_what_is_recorded(folder)


def _check_what_is_recorded(folder):
    """Spans of every lane, the text of tokens, and the advantage of what was trained."""
    [run] = open_runs([folder]).values()
    with run.record() as connection:
        number = "coalesce(json_extract(about, '$.samples'), 1)"  # of answers that one bar stands for
        lanes = dict(
            connection.execute(f"SELECT lane, sum({number}) FROM spans WHERE rollout_id = 0 GROUP BY lane")
        )
        assert lanes["engine-0"] == lanes["reward"] == 16 and lanes["trainer-0"] >= 2
        names = {name for (name,) in connection.execute("SELECT name FROM spans WHERE lane = 'loop'")}
        assert {"generating", "training", "pushing weights", "saving", "paused"} <= names
        found = [read_advantage(connection, row) for (row,) in connection.execute("SELECT id FROM samples")]
        assert found and None not in found
        assert abs(sum(advantage.value for advantage in found) / len(found)) < 0.1
    with open_record(folder) as record:
        [answer] = record.samples(Select(limit=1))
    with run.record() as connection:
        found = sample_pages.one(connection, answer.row)
    text = "".join(found["texts"][token] for token in found["tokens"])
    assert text == found["response"]


def take_everything(world, run, **changes):
    """A run that is asked for everything in turn, and does all of it."""
    folder = world / run
    process = start_train(
        world,
        run,
        num_rollout=400,
        lr=1e-6,  # so small that weights a push old make no difference: the temperature would
        save=world / f"{run}-saved",
        save_interval=1000,
        eval_prompt_data=["held_out", world / "prompts.jsonl"],
        eval_interval=1000,
        skip_eval_before_train=True,
        **changes,
    )

    def done(name, value=None):
        ask(folder, name, value, "test")
        row = wait_for(answered(folder, name), process, PATIENCE_S)
        assert row["state"] == "done", row
        return row

    try:
        wait_for(
            lambda: (folder / "record.db").exists() and series(world, run, "perf/step_time"),
            process,
            PATIENCE_S,
        )
        done("pause")
        done("lr", 5e-7)
        done("clip", 0.3)
        done("clip_high", 0.4)
        done("temperature", 0.7)
        done("resume")
        before = max(series(world, run, "perf/step_time"))
        wait_for(lambda: max(series(world, run, "train/loss")) > before + 3, process, PATIENCE_S)
        done("evaluate")
        saved = done("checkpoint")
        done("stop")
        assert process.wait(PATIENCE_S) == 0, (world / f"{run}.out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    assert series(world, run, "eval/held_out")
    assert step_path(world / f"{run}-saved", saved["rollout_id"]).is_dir()
    rates = series(world, run, "train/lr-pg_0")
    assert rates[0] == pytest.approx(1e-6) and rates[max(rates)] == pytest.approx(5e-7)
    # The trainer reads each sample at the temperature that it was drawn with.
    differences = series(world, run, "train/train_rollout_logprob_abs_diff")
    assert len(differences) > 4 and max(differences.values()) < 1e-3, differences


@pytest.mark.parametrize("rollout", [None, "slime.rollout.fully_async_rollout.generate_rollout_fully_async"])
def test_the_asynchronous_loops_take_every_action(world, rollout):
    run = "overlapped" if rollout is None else "fully"
    bound = {} if rollout is None else {"rollout_function_path": rollout, "max_weight_staleness": 1}
    take_everything(world, run, script="train_async.py", **bound)


@pytest.mark.megatron
def test_the_megatron_trainer_takes_every_action(world):
    pytest.importorskip("megatron.core", reason="needs megatron-core: `make test-megatron`")
    take_everything(world, "megatron", train_backend="megatron")


def test_a_resumed_run_keeps_what_was_changed_and_refuses_what_nobody_answered(world):
    folder = world / "run"
    ask(folder, "pause", None, "test")  # the run is over: it must not stop the next start
    last = max(series(world, "run", "train/lr-pg_0"))
    process = start_train(
        world, "run", num_rollout=last + 3, save=world / "saved", load=world / "saved", save_interval=1000
    )
    try:
        assert process.wait(PATIENCE_S) == 0, (world / "run.out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    rates = series(world, "run", "train/lr-pg_0")
    assert max(rates) > last and rates[max(rates)] == pytest.approx(5e-4)
    assert eventually(answered(folder, "pause"))["reply"] == "the run had ended before it could reply"
