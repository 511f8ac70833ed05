"""Records the run of `slime dashboard --demo` and takes the pictures of docs/dashboard.md.

    python tests/dashboard/record_demo.py run                   # a quick start, then 14 steps of two engines
    PYTHONPATH=tests/support python tests/dashboard/record_demo.py pictures  # with chromium

Look at the pictures before they are committed.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from slime import dashboard
from slime.cli.inspect.dashboard import demo_run

ROOT = Path(__file__).parent.parent.parent
PACKED = Path(dashboard.__file__).parent / "demo" / "demo.tar.xz"
KEPT = ("metrics.jsonl", "run.json", "record.db", "logs")
PICTURES = {
    "overview": "#/overview",
    "samples": "#/samples?kind=train&order=difference",
    "prompts": "#/prompts",
    "curves_dark": "#/curves",
    "timeline": "#/timeline?step=2",
    "waste": "#/waste",
}


def record() -> None:
    with tempfile.TemporaryDirectory(prefix="slime-demo-") as name:
        slime(name, "quickstart --run-dir runs/quickstart --num-rollout 2")
        slime(
            name,
            "train --config runs/quickstart/run.yaml --run-dir runs/demo --num-rollout 14 "
            "--rollout-num-gpus 2 --rollout-batch-size 12 --over-sampling-batch-size 14 "
            "--n-samples-per-prompt 8 --global-batch-size 96 --eval-interval 6 --save-interval 14 "
            "--save runs/demo/checkpoints --load runs/demo/checkpoints --save-hf runs/demo/hf-{rollout_id}",
        )
        folder = Path(name) / "runs" / "demo"
        with sqlite3.connect(folder / "record.db") as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("VACUUM")
        for path in (folder / "run.json", *folder.glob("logs/*")):
            path.write_text(path.read_text().replace(f"{name}/", ""))
        written = json.loads((folder / "run.json").read_text())
        written["machine"] |= {"host": "laptop", "pid": 1}
        (folder / "run.json").write_text(json.dumps(written, indent=1))
        with tarfile.open(PACKED, "w:xz", preset=9) as archive:
            for part in KEPT:
                archive.add(folder / part, f"demo/{part}", filter=_nobodys)
    print(f"{PACKED.relative_to(ROOT)}: {PACKED.stat().st_size / 1024:.0f} KiB")


def slime(folder: str, words: str) -> None:
    subprocess.run([sys.executable, "-m", "slime", *words.split()], cwd=folder, check=True)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def take_pictures() -> None:
    from page_world import serving  # imports pytest, which recording does not need
    from playwright.sync_api import sync_playwright

    with demo_run() as folder, serving(folder) as (url, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, place in PICTURES.items():
            dark = name.endswith("dark")
            page = browser.new_page(
                viewport={"width": 1180, "height": 1100 if name == "timeline" else 720},
                color_scheme="dark" if dark else "light",
            )
            page.goto(f"{url}/{place}")
            page.wait_for_selector("body[data-ready]")
            if name == "samples":
                page.locator("#row-2").click()
            page.wait_for_timeout(1500)
            page.screenshot(path=ROOT / "docs" / "images" / f"dashboard_{name}.png")
        browser.close()


if __name__ == "__main__":
    {"run": record, "pictures": take_pictures}[sys.argv[1]]()
