"""Records the run of `slime dashboard --demo` and takes the pictures of docs/dashboard.md.

    python tests/dashboard/record_demo.py run                   # a quick start, then 14 steps of two engines
    PYTHONPATH=tests/support python tests/dashboard/record_demo.py pictures [SWEEP]  # with chromium

SWEEP: the folder of a `slime sweep` with seeds, for the picture of the table of runs. The episode of the
picture of a conversation is written by hand. The pictures of the views System and Distributions and of an
image are taken by hand of runs of examples. Check the pictures before they are committed.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
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
KEPT = ("metrics.jsonl", "system.jsonl", "run.json", "record.db", "logs")
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PICTURES = {
    "overview": "#/overview",
    "overview_dark": "#/overview",
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


# The prompt, the first response, the result of the tool, and two last responses.
EPISODE = (
    "<|im_start|>system\nAnswer with the help of tools.<|im_end|>\n<|im_start|>user\nHow many days are there "
    "from 2024-02-27 to 2024-03-02?<|im_end|>\n<|im_start|>assistant\n",
    "2024 is a leap year, so February has 29 days. I will check with the tool.\n<tool_call>\n"
    '{"name": "days_between", "arguments": {"first": "2024-02-27", "last": "2024-03-02"}}\n</tool_call>',
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "There are 4 days from 2024-02-27 to 2024-03-02.<|im_end|>",
    "There are 5 days from 2024-02-27 to 2024-03-02, both included.<|im_end|>",
)


def make_episode(folder: Path) -> Path:
    """Write a run with one episode of a tool agent, whose history forked after the first turn."""
    from page_world import PieceBook, RecordWriter, Sample, group_entries, make_run

    make_run(folder, 1, advice=False)
    rng, ids = random.Random(4), dict[str, int]()

    def tokens(text: str) -> list[int]:
        return [
            ids.setdefault(word, 200 + len(ids)) for word in re.findall(r"<\|\w+\|>|\s?\w+|\s?.", text, re.S)
        ]

    prompt, first, result, *last = (tokens(text) for text in EPISODE)
    samples = []
    for copy, final in enumerate(last):
        middle, end = len(first), len(first) + len(result)
        spans = [*[("run:1", 0, middle)][copy:], ("run:1", end, end + len(final))]
        mask = [int(any(a <= n < b for _, a, b in spans)) for n in range(end + len(final))]
        turn = {"start": 0, "end": middle, "finish": "tool_calls", "tool_calls": ["days_between"]}
        final_turn = {
            "start": end,
            "end": end + len(final),
            "finish": "stop",
            "tool_calls": [],
            "trained": True,
        }
        samples.append(
            Sample(
                group_index=9,
                index=90 + copy,
                rollout_id=90,
                prompt="How many days are there from 2024-02-27 to 2024-03-02?",
                tokens=[*prompt, *first, *result, *final],
                response="".join([EPISODE[1], EPISODE[2], EPISODE[3 + copy]]),
                response_length=len(mask),
                label="4",
                reward=float(copy == 0),
                rollout_log_probs=[-rng.expovariate(2.5) * m for m in mask],
                loss_mask=mask,
                version_spans=spans,
                metadata={
                    "turns": [
                        {"turn": 0, **turn, "trained": copy == 0, "engine_s": 0.61, "reward": 0.5},
                        {"turn": 1 + copy, **final_turn, "engine_s": 0.32, "other_s": 0.08},
                    ]
                },
                status=Sample.Status.COMPLETED,
            )
        )
    texts = {number: word for word, number in ids.items()}
    book = PieceBook(lambda wanted: [texts[i] for i in wanted])
    writer = RecordWriter(folder / "record.db", "abc", 1 << 28)
    writer.add("train", 1, group_entries([samples], "trained"), version="run:1")
    writer.submit("pieces", lambda connection: book.write(connection, samples))
    writer.close()
    return folder


def take_pictures(sweep: Path | None) -> None:
    from page_world import serving  # imports pytest, which recording does not need
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(demo_run())
        agent = make_episode(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "agent")
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def take(name: str, url: str, size: dict[str, int], scheme: str = "light") -> None:
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(url)
            page.wait_for_selector("body[data-ready]")
            page.wait_for_timeout(1500)
            file = ROOT / "docs" / "images" / f"dashboard_{name}.png"
            page.screenshot(path=file)
            page.close()
            with Image.open(file) as picture:  # a third of the bytes, and no difference to the eye
                picture.convert("RGB").quantize(256, dither=0).save(file, optimize=True)

        url, _ = stack.enter_context(serving(folder))
        for name, place in PICTURES.items():
            take(name, f"{url}/{place}", WIDE, "dark" if name.endswith("dark") else "light")
        take("overview_phone_dark", f"{url}/#/overview", PHONE, "dark")
        url, _ = stack.enter_context(serving(agent))
        take("conversation", f"{url}/#/samples?step=1&order=made", WIDE)
        if sweep is not None:
            url, _ = stack.enter_context(serving(sweep))
            take("runs", f"{url}/#/runs", WIDE)
        browser.close()


if __name__ == "__main__":
    if sys.argv[1] == "run":
        record()
    else:
        take_pictures(Path(sys.argv[2]) if sys.argv[2:] else None)
