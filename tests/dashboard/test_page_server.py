"""The server of the page over real HTTP: what it answers, to whom, and what it refuses."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from page_world import HOSTILE, make_agent_run, make_run, serving
from patience import PATIENCE_S

from slime.cli.main import main
from slime.dashboard import distributions
from slime.dashboard.curves import Curves
from slime.liveness.wait_table import WaitRow, write_table
from slime.record.labels import LABELS_FILE, read_labels
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.run_file import add_restart


def ask(url, token=None, body=None, host=None):
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body is not None else None)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    if host:
        request.add_header("Host", host)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.headers, response.read()


def answer(url, **more):
    return json.loads(ask(url, **more)[1])


def status_of(url, **more):
    try:
        ask(url, **more)
        return 200
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "good")
    make_run(folder / "crashed", 3, exit="RuntimeError: CUDA out of memory", lr=2e-6, text=HOSTILE)
    (folder / "empty").mkdir()
    (folder / "empty" / "run.json").write_text("{}")
    (folder / "secret.txt").write_text("secret")
    with serving(folder / "good", folder / "crashed", folder / "empty") as (url, token):
        yield url, token, folder


def test_it_lists_runs_with_their_state_and_progress(world):
    runs = answer(f"{world[0]}/api/runs")["runs"]
    assert [(run["key"], run["state"], run["step"]) for run in runs] == [
        ("good", "finished", 6),
        ("crashed", "RuntimeError: CUDA out of memory", 3),
        ("empty", "lost: the process ended without a word", 0),
    ]


def test_trouble_comes_first_with_the_worst(world):
    trouble = answer(f"{world[0]}/api/runs/crashed")["trouble"]
    assert [entry["severity"] for entry in trouble] == ["error", "advice"]
    assert "CUDA out of memory" in trouble[0]["title"]


def test_a_folder_without_a_record_says_what_is_missing(world):
    found = answer(f"{world[0]}/api/runs/empty")
    assert "does not exist" in found["record"]["missing"] and found["headlines"] == []
    assert status_of(f"{world[0]}/api/runs/empty/samples") == 400


def test_curves_are_thinned_and_smoothed(world):
    [found] = answer(f"{world[0]}/api/runs/good/curves?name=rollout/raw_reward&width=3&smooth=0.5")
    assert found["x"] == [0, 2, 4] and found["y"] == pytest.approx([0.05, 0.25, 0.45])
    assert found["low"] == pytest.approx([0.0, 0.2, 0.4]) and len(found["smooth"]) == 3
    [part] = answer(f"{world[0]}/api/runs/good/curves?name=rollout/raw_reward&from=2&to=3")
    assert part["x"] == [1, 2, 3, 4]


def test_metrics_come_with_what_they_mean(world):
    rows = {row["name"]: row for row in answer(f"{world[0]}/api/runs/good/metrics")}
    assert "reward function" in rows["rollout/raw_reward"]["what"]


@pytest.mark.parametrize("order", ["made", "newest", "worst", "best", "longest", "shortest", "difference"])
def test_every_order_reaches_every_answer_once(world, order):
    base, seen, after, offset = (
        f"{world[0]}/api/runs/good/samples?kind=train&limit=7&order={order}",
        [],
        "",
        0,
    )
    while True:
        found = answer(f"{base}&offset={offset}&after={urllib.request.quote(after)}")
        seen += found["rows"]
        after, offset = found["after"], len(seen)
        if (found["total"] is None and not after) or not found["rows"]:
            break
    assert len({row["id"] for row in seen}) == len(seen) == 48
    if order in ("worst", "best"):
        rewards = [row["reward"] for row in seen]
        assert rewards == sorted(rewards, reverse=order == "best")


def test_answers_of_a_step_are_filtered_and_searched(world):
    found = answer(f"{world[0]}/api/runs/good/samples?kind=train&step=2&outcome=filtered")
    assert found["total"] == 4 and {row["reason"] for row in found["rows"]} == {"zero_std"}
    found = answer(f"{world[0]}/api/runs/good/samples?q=OF%20STEP%203&order=newest")
    assert len(found["rows"]) == 8 and found["after"] == "" and found["searched"] == 1.0


def test_an_answer_has_the_text_probability_version_mask_and_advantage_of_its_tokens(world):
    [row] = answer(f"{world[0]}/api/runs/good/samples?kind=train&step=0&limit=1")["rows"]
    found = answer(f"{world[0]}/api/runs/good/samples/{row['id']}")
    assert len(found["tokens"]) == len(found["log_probs"]) == len(found["mask"]) == 6
    assert found["texts"][str(found["tokens"][0])] == f"w{found['tokens'][0]} "
    assert found["versions"] == [["run:1", 0, 3], ["run:2", 3, 6]]
    assert found["advantage"] == {"value": -1.5, "tokens": None} and len(found["siblings"]) == 4
    history = answer(f"{world[0]}/api/runs/good/prompts/{found['prompt_hash']}")
    assert [entry["step"] for entry in history] == [0, 1, 2, 3, 4, 5]


def test_prompts_are_listed_by_how_much_their_reward_rose(world):
    found = answer(f"{world[0]}/api/runs/good/prompts?kind=train")
    rises = [row["after"] - row["before"] for row in found]
    assert rises == sorted(rises, reverse=True) and rises[0] > 0
    history = answer(f"{world[0]}/api/runs/good/prompts/{found[0]['prompt_hash']}")
    assert [history[0]["reward"], history[-1]["reward"]] == [found[0]["before"], found[0]["after"]]


def test_the_timeline_packs_spans_of_a_lane_into_rows(world):
    found = answer(f"{world[0]}/api/runs/good/timeline?step=1")
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert list(lanes) == ["loop", "engine-0", "engine-1", "trainer-0", "push", "waits: rollout"]
    assert lanes["loop"]["rows"] == 1 and lanes["engine-0"]["rows"] == 2
    assert lanes["engine-0"]["busy"] == pytest.approx(3.4)


def test_no_path_leads_out_of_the_folder(world):
    for name in ("..%2F..%2Fsecret.txt", "%2e%2e/secret.txt", "..%2Frun.json", "secret.txt", "run.json"):
        assert status_of(f"{world[0]}/api/runs/good/logs/{name}") == 404
    (world[2] / "good" / "logs" / "link.log").symlink_to(world[2] / "secret.txt")
    assert status_of(f"{world[0]}/api/runs/good/logs/link.log") == 404
    (world[2] / "crashed" / "logs").rename(world[2] / "crashed" / "kept")
    (world[2] / "outside").mkdir()
    (world[2] / "outside" / "secret.log").write_text("secret")
    (world[2] / "crashed" / "logs").symlink_to(world[2] / "outside")
    assert answer(f"{world[0]}/api/runs/crashed/logs") == []
    assert status_of(f"{world[0]}/api/runs/crashed/logs/secret.log") == 404
    (world[2] / "crashed" / "logs").unlink()
    (world[2] / "crashed" / "kept").rename(world[2] / "crashed" / "logs")
    for path in ("/../secret.txt", "/js/..%2f..%2frun_folder.py", "/api/runs/..%2f/settings"):
        assert status_of(world[0] + path) == 404


def test_a_token_that_stands_in_a_log_is_not_served(world):
    url, token, folder = world
    logs = folder / "good" / "logs"
    logs.mkdir(exist_ok=True)
    other = "page: http://127.0.0.1:9/#token=of-Another_Page done"
    error = f"[2026-01-01 00:00:00] a.py:1 - ERROR: {token} was wrong"
    (logs / "driver.log").write_text(f"page: http://127.0.0.1:8/#token={token}\n{other}\n{error}\n")
    try:
        seen = answer(f"{url}/api/runs/good/logs/driver.log")["lines"]
        assert seen[0].startswith("page: http://127.0.0.1:8/#token=") and seen[1].endswith(" done")
        for part in (token, "of-Another_Page"):
            for path in ("/logs/driver.log", f"/logs/driver.log?q={part}", "", "/logs/driver.log?end=45"):
                assert part[:8] not in ask(f"{url}/api/runs/good{path}")[1].decode().partition("token=")[2]
            assert not answer(f"{url}/api/runs/good/logs/driver.log?q={part[:4]}")["lines"]
    finally:
        (logs / "driver.log").unlink()


def test_the_policy_lets_nothing_but_the_pages_own_files_run(world):
    for path in ("/", "/api/runs", "/js/main.js", "/nothing"):
        try:
            headers = ask(world[0] + path)[0]
        except urllib.error.HTTPError as error:
            headers = error.headers
        assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    # Answers of models are JSON, never a page.
    headers, body = ask(f"{world[0]}/api/runs/crashed/samples?limit=1")
    assert headers["Content-Type"].startswith("application/json") and b"script" in body


def test_a_name_of_another_site_is_refused(world):
    assert status_of(f"{world[0]}/api/runs", host="evil.example") == 403


def test_an_action_needs_the_token_and_a_run_that_runs(world):
    url, token, _ = world
    body = {"name": "lr", "value": 1e-5}
    assert status_of(f"{url}/api/runs/good/actions", body=body) == 401
    assert status_of(f"{url}/api/runs/good/actions", body=body, token="wrong") == 401
    assert status_of(f"{url}/api/runs/good/actions", body=body, token=token) == 400  # it is finished


def test_an_action_on_a_running_run_becomes_a_row_that_waits(tmp_path):
    make_run(tmp_path / "live", exit=None)
    lock = FolderLock(tmp_path / "live", "--run-dir")
    try:
        with serving(tmp_path / "live") as (url, token):
            actions = f"{url}/api/runs/live/actions"
            asked = answer(actions, body={"name": "lr", "value": 1e-5}, token=token)
            assert status_of(actions, body={"name": "lr", "value": -1}, token=token) == 400
            assert status_of(actions, body={"name": "rm", "value": None}, token=token) == 400
            assert status_of(actions, body=[], token=token) == 400
            [row] = answer(actions)
            assert asked == {"id": row["id"]}
            assert (row["name"], row["value"], row["state"], row["who"]) == ("lr", 1e-5, "asked", "page")
    finally:
        lock.release()


def test_a_run_that_is_paused_has_that_badge_and_takes_actions(tmp_path):
    make_run(tmp_path / "live", 2, exit=None)
    lock = FolderLock(tmp_path / "live", "--run-dir")
    try:
        write_table(tmp_path / "live", [WaitRow("run", "paused", "", time.time() - 95, None)])
        with serving(tmp_path / "live") as (url, token):
            [run] = answer(f"{url}/api/runs")["runs"]
            assert run["state"] == "paused" and 90 < time.time() - run["paused_since"] < 1000
            assert answer(f"{url}/api/runs/live")["state"] == "paused"
            asked = answer(f"{url}/api/runs/live/actions", body={"name": "resume"}, token=token)
            assert [row["id"] for row in answer(f"{url}/api/runs/live/actions")] == [asked["id"]]
    finally:
        lock.release()


def test_other_machines_need_the_token_to_read(tmp_path):
    make_run(tmp_path / "run", 1)
    with serving(tmp_path / "run", host="0.0.0.0") as (url, token):
        assert status_of(f"{url}/api/runs") == 401
        assert status_of(f"{url}/api/runs/{tmp_path.name}/samples") == 401
        assert status_of(f"{url}/") == 200  # which asks for it
        assert len(answer(f"{url}/api/runs", token=token)["runs"]) == 1


def test_what_is_logged_later_is_told_and_read(tmp_path):
    from page_world import START, metric_lines

    make_run(tmp_path / "live", 2, exit=None)
    with serving(tmp_path / "live") as (url, _):
        curve = f"{url}/api/runs/live/curves?name=rollout/raw_reward"
        assert answer(curve)[0]["x"] == [0, 1]
        with urllib.request.urlopen(f"{url}/api/events", timeout=60) as events:
            assert events.readline() == b"event: hello\n"
            with (tmp_path / "live" / "metrics.jsonl").open("a") as file:
                for step in (2, 1):  # a resumed run logs a step again
                    for line in metric_lines(step, START + 100):
                        file.write(json.dumps(line | {"rollout/raw_reward": 0.9}) + "\n")
                file.write('{"torn')
            lines = [events.readline()]
            while not lines[-1].startswith(b"event: changed"):
                lines.append(events.readline())
            assert json.loads(events.readline()[6:]) == {"runs": ["live"]}
        [found] = answer(curve)
        assert found["x"] == [0, 1, 2] and found["y"] == [0.0, 0.9, 0.9]


def test_restarts_of_the_trainer_are_told(tmp_path):
    make_run(tmp_path / "run", 2)
    add_restart(tmp_path / "run", {"step": 2, "cause": "rank 1 was killed", "begins_from": "step 1"})
    with serving(tmp_path / "run") as (url, _):
        trouble = answer(f"{url}/api/runs/{tmp_path.name}")["trouble"]
    assert trouble[0]["severity"] == "warning" and "rank 1 was killed" in trouble[0]["title"]


def test_overdue_waits_and_silent_processes_of_a_live_run_are_its_first_trouble(tmp_path):
    make_run(tmp_path / "live")
    lock, now = FolderLock(tmp_path / "live", "--run-dir"), time.time()
    rows = [
        WaitRow("the watch", "a sign of life (its process is stopped)", "trainer-1", now - 9, 60.0),
        WaitRow("driver", "POST /pause", "engine-0", now - 30, 10.0),
        WaitRow("run", "training", "", now - 30, None),
    ]
    write_table(tmp_path / "live", rows)
    with serving(tmp_path / "live") as (url, _):
        trouble = answer(f"{url}/api/runs/live")["trouble"]
    lock.release()
    assert trouble[0]["severity"] == "error" and "driver waits for engine-0" in trouble[0]["title"]
    assert trouble[1]["severity"] == "warning" and "for trainer-1: a sign of life" in trouble[1]["title"]
    assert not [entry for entry in trouble if "run waits: training" in entry["title"]]


def test_runs_of_one_name_are_named_by_their_parents(tmp_path):
    for parent in ("first", "second"):
        make_run(tmp_path / parent / "rl", 1)
    make_run(tmp_path / "lr=1,seed=2", 1)
    paths = [tmp_path / "first" / "rl", tmp_path / "second" / "rl", tmp_path / "lr=1,seed=2"]
    with serving(*paths) as (url, _):
        found = answer(f"{url}/api/runs")
    assert [run["name"] for run in found["runs"]] == ["first-rl", "second-rl", "lr=1_seed=2"]
    assert found["shown"] == ["first-rl", "second-rl", "lr=1_seed=2"]


def test_an_episode_has_its_turns_and_the_branches_of_its_tree(tmp_path):
    make_agent_run(tmp_path / "agent")
    with serving(tmp_path / "agent") as (url, _):
        [first, second] = answer(f"{url}/api/runs/agent/samples?step=1")["rows"]
        found = answer(f"{url}/api/runs/agent/samples/{second['id']}")
        plain = answer(f"{url}/api/runs/agent/samples/1")
    assert [(turn["turn"], turn["start"], turn["end"]) for turn in found["turns"]] == [(0, 0, 2), (2, 4, 6)]
    assert found["turns"][0]["tool_calls"] == ["calculate"] and found["turns"][0]["reward"] == 0.25
    branches = [(one["id"], [turn["turn"] for turn in one["turns"]]) for one in found["episode"]]
    assert branches == [(first["id"], [0, 1]), (second["id"], [0, 2])]
    assert plain["turns"] == [] and plain["episode"] == []


def test_advice_that_is_logged_again_is_listed_once(tmp_path):
    log = make_run(tmp_path / "again", 1) / "logs" / "driver.log"
    log.write_text(log.read_text() * 3)
    with serving(tmp_path / "again") as (url, _):
        trouble = answer(f"{url}/api/runs/again")["trouble"]
    assert [entry["severity"] for entry in trouble] == ["advice"]


def test_the_list_of_runs_has_their_scores_and_knows_which_differ_by_the_seed_only(tmp_path):
    make_run(tmp_path / "a1", 3, seed=1)
    make_run(tmp_path / "a2", 3, seed=2)
    make_run(tmp_path / "b", 3, lr=2e-6)
    score = {"time": 1.0, "run": "abc", "start": 1, "step_key": "eval/step", "step": 2, "eval/math": 0.75}
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(score | {"eval/math-truncated_ratio": 0.5, "eval/other": "nan"}) + "\n")
    with serving(tmp_path) as (url, _):
        for _ in range(2):  # from the end of the files, and from all of them
            runs = answer(f"{url}/api/runs")["runs"]
            assert [run["seed"] for run in runs] == [1, 2, 0]
            assert runs[0]["group"] == runs[1]["group"] != runs[2]["group"]
            assert [run["main"]["last"] for run in runs] == [0.2, 0.2, 0.2]
            assert [run["evaluations"] for run in runs] == [{}, {}, {"eval/math": 0.75, "eval/other": None}]
            for run in runs:
                answer(f"{url}/api/runs/{run['key']}")


def test_distributions_cover_all_steps_with_shared_bins(world):
    found = answer(f"{world[0]}/api/runs/good/distributions?kind=train")
    assert found["steps"] == [0, 1, 2, 3, 4, 5] and found["of_steps"] == 6 and found["samples"] == 48
    for name, count in (("reward", 8), ("length", 8), ("advantage", 4), ("staleness", 2), ("difficulty", 2)):
        histogram = found["histograms"][name]
        assert [sum(column) for column in histogram["counts"]] == [count] * 6, name
        assert all(len(column) == len(histogram["edges"]) - 1 for column in histogram["counts"])
    assert found["histograms"]["length"]["means"] == [6.0] * 6
    # Two groups with four responses; the first response of each is right in odd steps.
    assert found["pass_rates"]["pass@1"] == [0, 0.25] * 3 and found["pass_rates"]["pass@4"] == [0, 1] * 3
    assert len(found["hardest"]) == 2
    assert answer(f"{world[0]}/api/runs/good/distributions?kind=eval")["steps"] == []


def test_distributions_of_a_long_run_read_a_part_of_it_in_time(tmp_path, monkeypatch):
    make_run(tmp_path / "long", 150)
    with serving(tmp_path / "long") as (url, _):
        found = answer(f"{url}/api/runs/long/distributions")
        assert len(found["steps"]) <= 64 and found["steps"][-1] == 149 and found["of_steps"] == 150
        monkeypatch.setattr(distributions, "_DEADLINE_S", 0.0)
        assert answer(f"{url}/api/runs/long/distributions")["steps"] == [149]


def test_the_first_list_of_runs_does_not_wait_until_the_curves_of_many_runs_are_read(tmp_path, monkeypatch):
    for number in range(6):
        make_run(tmp_path / f"run{number}", 1)
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(Curves, "read", lambda curves: begun.set() or ended.wait(PATIENCE_S))
    with serving(tmp_path) as (url, _):
        try:
            assert begun.wait(PATIENCE_S)
            assert len(answer(f"{url}/api/runs")["runs"]) == 6
            assert not ended.is_set()
        finally:
            ended.set()


def test_tags_and_notes_are_kept_in_the_folder_of_the_run_and_need_the_token(tmp_path):
    folder = make_run(tmp_path / "good", 1)
    with serving(folder) as (url, token):
        actions = f"{url}/api/runs/good/actions"
        body = {"name": "label", "tags": ["  base  line", "base line", ""], "note": HOSTILE}
        assert status_of(actions, body=body) == 401 and status_of(actions, body=body, token="wrong") == 401
        kept = {"tags": ["base line"], "note": HOSTILE}
        assert answer(actions, body=body, token=token) == kept == read_labels(folder)
        [run] = answer(f"{url}/api/runs")["runs"]
        assert {"tags": run["tags"], "note": run["note"]} == kept
        for wrong in ({"tags": 1, "note": ""}, {"tags": []}, {"tags": ["a" * 41], "note": ""}):
            assert status_of(actions, body={"name": "label", **wrong}, token=token) == 400
        assert status_of(actions, body={**body, "note": "a" * 1001}, token=token) == 400
        assert read_labels(folder) == kept
    (folder / LABELS_FILE).write_text("[1")
    assert read_labels(folder) == {"tags": [], "note": ""}
    with serving(folder, may_act=False) as (url, token):
        assert status_of(f"{url}/api/runs/good/actions", body=body, token=token) == 403


def test_the_command_line_sets_and_shows_tags_and_a_note(tmp_path, capsys):
    folder = make_run(tmp_path / "good", 1)
    assert main(["note", str(folder), "too high", "--tags", "a, b"]) == 0
    assert main(["note", str(folder), "--tags", ""]) == 0
    assert capsys.readouterr().out == "tags: a, b\nnote: too high\ntags: none\nnote: too high\n"
    assert main(["note", str(folder), "x" * 1001]) == 2 and "shorten it" in capsys.readouterr().err
    assert main(["note", str(tmp_path)]) == 2 and "is no folder of a run" in capsys.readouterr().err
