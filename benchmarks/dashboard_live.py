"""What the page costs a run that goes on, with somebody looking at it all the time.

    python benchmarks/dashboard_live.py                 # the quick start on this machine; some five minutes
    python benchmarks/dashboard_live.py --browser       # the viewer is chromium, see `make test-browser`

Stretches with and without a viewer take turns in one run. Counted are CPU seconds of the run's own processes,
for each step, and of the page's process, which is another one. Without --browser the viewer asks for what the
overview asks for whenever the page tells of news.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WANTED = ("rollout/raw_reward", "train/loss", "rollout/response_len/mean", "perf/step_time")
PATIENCE_S = 900.0


@dataclass
class Stretch:
    """CPU seconds of the run and of the page, and the steps that were made meanwhile."""

    run_s: float
    page_s: float
    steps: int
    wall_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stretches", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each at the least")
    parser.add_argument("--browser", action="store_true", help="needs chromium and playwright")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-live-") as name:
        run = start_run(Path(name))
        try:
            measure(run, Path(name) / "rl", options)
        finally:
            end(run)


def start_run(folder: Path) -> psutil.Popen:
    """The quick start, which does not end before we do."""
    words = ["quickstart", "--run-dir", str(folder), "--num-rollout", "1000", "--quiet"]
    run = psutil.Popen([sys.executable, "-m", "slime", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while num_steps(folder / "rl") < 3:
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the quick start made no step; run `slime quickstart` to see why")
        time.sleep(0.5)
    return run


def measure(run: psutil.Popen, folder: Path, options: argparse.Namespace) -> None:
    words = [sys.executable, "-m", "slime", "dashboard", str(folder), "--port", "0"]
    page = psutil.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        address = re.findall(r"http:\S+", page.stdout.readline())[0]
        alone, watched = [], []
        for number in range(options.stretches):
            alone.append(stretch(run, page, folder, options.seconds))
            with viewer(address, folder.name, options.browser) as news:
                watched.append(stretch(run, page, folder, options.seconds))
            print(f"  {number + 1} of {options.stretches}: {news[0]} times told of news", flush=True)
    finally:
        end(page)
    tell(alone, watched)


def tell(alone: list[Stretch], watched: list[Stretch]) -> None:
    each = [[s.run_s / max(1, s.steps) for s in kind] for kind in (alone, watched)]
    means = [statistics.mean(kind) for kind in each]
    errors = [statistics.stdev(kind) / len(kind) ** 0.5 for kind in each]
    for name, mean, error in zip(("nobody looks", "a viewer"), means, errors, strict=True):
        print(f"{name:<14} {mean:.3f} +- {error:.3f} CPU s of the run's processes a step")
    page_s, run_s = sum(s.page_s for s in watched), sum(s.run_s for s in watched)
    wall_s, steps = sum(s.wall_s for s in watched), sum(s.steps for s in watched)
    print(f"the page's process with a viewer: {page_s:.2f} CPU s in {steps} steps of {wall_s / steps:.1f} s")
    print(f"  {100 * page_s / run_s:.2f}% of the run's CPU, {100 * page_s / wall_s:.2f}% of one core")


def stretch(run: psutil.Popen, page: psutil.Popen, folder: Path, seconds: float) -> Stretch:
    """From the end of one step to the end of another."""
    first = next_step(folder, num_steps(folder), run)
    before, started = (cpu_s(run), cpu_s(page)), time.monotonic()
    time.sleep(seconds)
    last = next_step(folder, num_steps(folder), run)
    return Stretch(cpu_s(run) - before[0], cpu_s(page) - before[1], last - first, time.monotonic() - started)


def next_step(folder: Path, after: int, run: psutil.Popen) -> int:
    while (now := num_steps(folder)) <= after:
        if run.poll() is not None:
            raise SystemExit("the run has ended")
        time.sleep(0.02)
    return now


def num_steps(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b'"perf/step_time"')
    except OSError:
        return 0


def cpu_s(process: psutil.Process) -> float:
    """Of it and all that it started, those that have ended too."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@contextlib.contextmanager
def viewer(address: str, key: str, in_browser: bool) -> Iterator[list[int]]:
    """Somebody who looks at the overview; how often there were news for them."""
    news, over = [0], threading.Event()
    if in_browser:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            path = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            shown = browser.new_page()
            shown.goto(address)
            shown.wait_for_selector("body[data-ready]")
            yield news
            news[0] = int(shown.get_attribute("body", "data-refreshed") or 0)
            browser.close()
        return
    look(address, key)
    thread = threading.Thread(target=listen, args=(address, key, news, over), daemon=True)
    thread.start()
    try:
        yield news
    finally:
        over.set()
        thread.join(60)


def listen(address: str, key: str, news: list[int], over: threading.Event) -> None:
    with urllib.request.urlopen(f"{address}api/events", timeout=60) as events:
        for line in events:
            if over.is_set():
                return
            if line.startswith(b"event: changed"):
                news[0] += 1
                look(address, key)


def look(address: str, key: str) -> None:
    """What the overview asks for."""
    curves = [f"api/runs/{key}/curves?name={name}&width=400&smooth=0.6" for name in WANTED]
    for path in ("api/runs", f"api/runs/{key}", *curves):
        with urllib.request.urlopen(address + path, timeout=60) as response:
            json.loads(response.read())


def end(process: psutil.Popen) -> None:
    process.terminate()
    try:
        process.wait(60)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
