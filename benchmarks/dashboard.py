"""How fast the page is on a large record: first paint, scrolling, sorting; and what it costs a live run.

    python benchmarks/dashboard.py --steps 10000 --samples 100    # a million samples; minutes to make
    python benchmarks/dashboard.py --browser                      # in chromium too, see `make test-browser`

The record is made once in --folder and used again. Times are medians of several tries on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from slime.liveness.stacks import watch_exit
from slime.record import schema
from slime.record.samples import encode_numbers
from slime.utils.files.run_file import RunRecord, Start, write_run

TRIES = 5
# What somebody does -> the view, the act, and when what it asks for is not yet seen. Measured in the page
# itself, from the act to the frame that shows it.
ACTS = {
    "jump in the list": (
        "samples",
        "document.querySelector('.vlist').scrollTop = 1e7",
        "!document.querySelector('.row .rbar') || +document.querySelector('.row').id.slice(4) < 1000",
    ),
    "open an answer": (
        "samples",
        "document.querySelectorAll('.vlist .row')[5].click()",
        "!document.querySelector('.tokens i')",
    ),
    "colour it by mask": (
        "samples",
        "document.querySelector('input[name=mode][value=mask]').click()",
        "!document.querySelector('.tokens i.m1')",
    ),
    "sort by reward": (
        "samples",
        "const sort = document.querySelector('select[aria-label=Sort]'); "
        "const first = document.querySelector('.row:nth-child(3)'); "
        "sort.value = 'best'; sort.dispatchEvent(new Event('change'))",
        "first.isConnected || !document.querySelector('.row .rbar')",
    ),
    "zoom a curve": (
        "curves",
        "const from = performance.getEntriesByType('resource').length; "
        "document.querySelector('.plot').dispatchEvent(new KeyboardEvent('keydown', { key: '+' }))",
        "performance.getEntriesByType('resource').length === from",
    ),
    "next step of the timeline": (
        "timeline",
        "const old = document.querySelector('.lanes'); "
        "document.querySelector('button[aria-label=\"Step before\"]').click()",
        "old.isConnected || !document.querySelector('.lanes')",
    ),
    "zoom the timeline": (
        "timeline",
        "document.querySelector('button[aria-label=\"Zoom in\"]').click()",
        "false",
    ),
    "go to the settings": (
        "timeline",
        "location.hash = '#/settings'",
        "document.body.dataset.view !== 'settings'",
    ),
}
TIMED = (
    "async () => { const begin = performance.now(); %s; "
    "do { await new Promise(requestAnimationFrame) } while (%s); return performance.now() - begin }"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="of a step")
    parser.add_argument("--folder", type=Path, default=Path("runs/huge"))
    parser.add_argument("--browser", action="store_true", help="needs chromium and playwright")
    options = parser.parse_args()
    if options.steps < 1 or options.samples < 10 or options.samples % 10:
        parser.error("--samples: groups have ten; a step needs one of them at least")
    folder = options.folder.with_name(f"{options.folder.name}-{options.steps}x{options.samples}")
    if not (folder / "run.json").is_file():
        started = time.monotonic()
        make_record(folder, options.steps, options.samples)
        print(f"made {folder} in {time.monotonic() - started:.0f} s")
    size = (folder / "record.db").stat().st_size / 2**20
    print(f"{options.steps} steps, {options.steps * options.samples} samples, record of {size:.0f} MiB")
    command = [sys.executable, "-m", "slime", "dashboard", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.findall(r"http:\S+", server.stdout.readline())[0]
        ask_server(address, folder.name, options.steps, options.samples)
        if options.browser:
            ask_browser(address, folder.name)
        cost_of_a_viewer(address, server.pid)
    finally:
        server.terminate()
        server.wait()


def make_record(folder: Path, steps: int, samples: int) -> None:
    """Straight into the tables, in groups of ten; the file is what a run of that size leaves."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    rng = random.Random(0)
    connection = schema.create_or_open(folder / "record.db", "huge")
    connection.execute("PRAGMA synchronous = OFF")
    numbers = []
    for _ in range(64):
        ids, probs = [rng.randrange(1000) for _ in range(40)], [-rng.random() for _ in range(32)]
        numbers.append(encode_numbers(ids, probs, None, 32, []))
    words = [f"the answer is {i} because of reason {i % 97} and so on" for i in range(1000)]
    connection.executemany("INSERT INTO pieces VALUES (?, ?)", [(i, f" w{i}") for i in range(1000)])
    group_row = sample_row = 0
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            at = 1.7e9 + 10.0 * step
            mean = 0.2 + 0.6 * step / steps
            connection.execute(
                "INSERT INTO rollouts (id, kind, rollout_id, time, version, num_groups, num_samples, "
                "mean_reward) VALUES (?, 'train', ?, ?, ?, ?, ?, ?)",
                (step + 1, step, at, f"huge:{step}", samples // 10, samples, mean),
            )
            groups, rows = [], []
            for _ in range(samples // 10):
                group_row += 1
                prompt = group_row % 5000
                groups.append(
                    (group_row, step + 1, group_row, f"question {prompt}?", prompt, "1", rng.random())
                )
                for _ in range(10):
                    sample_row += 1
                    reward = float(rng.random() < mean)
                    text, pick = words[sample_row % 1000], sample_row % 64
                    values = (sample_row, group_row, sample_row, reward, text, 8 + sample_row % 25)
                    rows.append((*values, numbers[pick]))
            connection.executemany(
                "INSERT INTO groups (id, rollout, group_index, prompt, prompt_hash, label, spread, outcome) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'trained')",
                groups,
            )
            connection.executemany(
                "INSERT INTO samples (id, group_row, sample_index, reward, response, num_tokens, "
                "numbers, status) VALUES (?, ?, ?, ?, ?, ?, ?, 'completed')",
                rows,
            )
            spans = [(step, "loop", "generating", at, at + 6), (step, "loop", "training", at + 6, at + 10)]
            spans += [(step, f"engine-{i % 4}", f"sample {i}", at + i / 9, at + 3 + i / 9) for i in range(24)]
            connection.executemany(
                "INSERT INTO spans (rollout_id, lane, name, start, end) VALUES (?, ?, ?, ?, ?)", spans
            )
            metrics.write(json.dumps(_line(step, at, mean, rng)) + "\n")
            if step % 500 == 499:
                connection.commit()
    connection.commit()
    connection.close()
    settings = {"num_rollout": {"value": steps, "source": "default"}}
    start = Start(
        "2026-01-01T00:00:00+00:00", settings, {}, {}, end="2026-01-02T00:00:00+00:00", exit="finished"
    )
    write_run(folder, RunRecord("huge", folder.name, start))


def _line(step: int, at: float, mean: float, rng: random.Random) -> dict[str, object]:
    values = {f"rollout/reward/part_{i}": mean + rng.random() for i in range(30)}
    known = {
        "rollout/raw_reward": mean + rng.random() / 5,
        "perf/step_time": 10.0,
        "train/loss": rng.random(),
    }
    return {
        "time": at,
        "run": "huge",
        "step_key": "rollout/step",
        "step": step,
        "rollout/step": step,
        **known,
        **values,
    }


def ask_server(address: str, key: str, steps: int, samples: int) -> None:
    run = f"{address}api/runs/{key}"
    tell("first answer (list of runs)", lambda: get(f"{address}api/runs"), tries=1)
    questions = {
        "overview": "",
        "list of metrics": "/metrics",
        "nine curves": "/curves?width=600&smooth=0.6"
        + "".join(f"&name=rollout/reward/part_{i}" for i in range(9)),
        "samples, first page": "/samples?kind=train&order=newest",
        "samples, in the middle": f"/samples?kind=train&order=made&offset={steps * samples // 2}",
        "samples of lowest reward": "/samples?kind=train&order=worst",
        "samples, longest": "/samples?kind=train&order=longest",
        "samples by difference": "/samples?kind=train&order=difference",
        "samples of a step": f"/samples?kind=train&step={steps // 2}&order=best",
        "text that is nowhere (a part)": "/samples?q=nowhere+at+all&order=newest",
        "one answer by tokens": f"/samples/{min(4711, steps * samples)}",
        "one prompt over the run": f"/prompts/{min(17, steps * samples // 10)}",
        "timeline of 25 steps": f"/timeline?from={max(0, steps - 25)}&to={steps - 1}",
    }
    for name, path in questions.items():
        tell(name, lambda path=path: get(run + path))


def ask_browser(address: str, key: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        took: dict[str, list[float]] = {}
        for _ in range(TRIES):
            page, view = browser.new_page(), "samples"
            page.goto(f"{address}#/{view}?runs={key}")
            page.wait_for_selector(".vlist .row .rbar")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            took.setdefault("first paint", []).append(page.evaluate(paint))
            took.setdefault("the list is there", []).append(page.evaluate("performance.now()"))
            for name, (where, act, until) in ACTS.items():
                if where != view:
                    view = where
                    page.evaluate(f"location.hash = '#/{view}?runs={key}'")
                    page.wait_for_selector(f"body[data-view={view}] canvas")
                    page.wait_for_timeout(300)  # what is being loaded is no part of the next act
                took.setdefault(name, []).append(page.evaluate(TIMED % (act, until)))
            page.close()
        browser.close()
    for name, values in took.items():
        print(f"  browser: {name:<26} {statistics.median(values):6.0f} ms, at most {max(values):.0f}")


def cost_of_a_viewer(address: str, pid: int, seconds: float = 10.0) -> None:
    """CPU of the server while somebody watches a run; the rest of a step's machine is the run's."""
    with urllib.request.urlopen(f"{address}api/events") as events:
        events.readline()
        process = psutil.Process(pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(seconds)
        used = sum(process.cpu_times()[:2]) - before
    print(f"  a viewer attached: {100 * used / seconds:.2f}% of one core")


def tell(name: str, ask: Callable[[], bytes], tries: int = TRIES) -> None:
    times: list[float] = []
    size = 0
    for _ in range(tries):
        started = time.perf_counter()
        size = len(ask())
        times.append(1000 * (time.perf_counter() - started))
    print(f"  {name:<33} {statistics.median(times):8.1f} ms {size / 1024:8.1f} KiB", flush=True)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


if __name__ == "__main__":
    main()
    watch_exit()
