"""What the tests of the page share: folders of made runs, small or hostile, and a page over them."""

import asyncio
import contextlib
import json
import random
import threading
from pathlib import Path
from unittest import mock

from aiohttp import web
from patience import PATIENCE_S

from slime.dashboard import distributions, sample_pages
from slime.dashboard.access import Access
from slime.dashboard.run_folder import open_runs
from slime.dashboard.server import Page
from slime.observability.tracer import Span, write_spans
from slime.record import RecordWriter, group_entries
from slime.record.additions import Advantage, PieceBook, write_advantages, write_histograms
from slime.utils.files.run_file import RunRecord, Start, write_run
from slime.utils.types import Sample

HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">'
START = 1_790_000_000.0


def make_sample(step, group, copy, rng, text=None, length=6):
    index = (step * 2 + group) * 4 + copy
    return Sample(
        group_index=step * 2 + group,
        index=index,
        prompt=f"What is {group}+{group}?",
        tokens=[3, 4, *[10 + (index + i) % 50 for i in range(length)]],
        response=text or f"answer {index} of step {step}",
        response_length=length,
        label=str(2 * group),
        reward=rng.random() if copy else float(step % 2),
        rollout_log_probs=[-rng.random() * 2 for _ in range(length)],
        loss_mask=[1] * (length - 1) + [0],
        version_spans=[("run:1", 0, 3), ("run:2", 3, length)],
        status=Sample.Status.COMPLETED,
    )


def make_run(folder: Path, steps=6, *, exit="finished", text=None, lr=1e-6, advice=True, seed=0) -> Path:
    """A run of two prompts with four answers each a step."""
    rng = random.Random(0)
    (folder / "logs").mkdir(parents=True)
    settings = {
        "lr": {"value": lr, "source": "command line"},
        "seed": {"value": seed, "source": "command line"},
        "num_rollout": {"value": steps, "source": "command line"},
        "loss_type": {"value": "policy_loss", "source": "default"},
        "advantage_estimator": {"value": "grpo", "source": "default"},
    }
    start = Start("2026-09-21T12:53:20+00:00", settings, {"torch": "2"}, {"host": "a"})
    end = "2026-09-21T12:59:20+00:00" if exit else None
    write_run(folder, RunRecord("abc", folder.name, Start(**{**_fields(start), "end": end, "exit": exit})))
    writer = RecordWriter(folder / "record.db", "abc", 256 << 20)
    book = PieceBook(lambda ids: [f"w{i} " for i in ids])
    lines = []
    for step in range(steps):
        groups = [[make_sample(step, g, c, rng, text) for c in range(4)] for g in range(2)]
        entries = group_entries([groups[0]], "trained") + group_entries([groups[1]], "filtered", "zero_std")
        writer.add("train", step, entries, version=f"run:{step + 1}")
        writer.submit("pieces", lambda c, g=groups: book.write(c, g[0] + g[1]))
        at = START + 10.0 * step
        spans = [
            Span(step, "loop", "generating", at, at + 5),
            Span(step, "loop", "training", at + 5, at + 9),
            Span(step, "loop", "pushing weights", at + 9, at + 9.5),
            Span(step, "trainer-0", "actor_train", at + 6, at + 9),
            *[
                Span(step, f"engine-{i % 2}", f"sample {s.index}", at + i * 0.2, at + 3 + i * 0.2)
                for i, s in enumerate(groups[0])
            ],
            Span(step, "push", "engines take it", at + 9.1, at + 9.4),
            Span(step, "waits: rollout", "a group", at, at + 3, {"for": "engine-0"}),
        ]
        writer.submit("spans", lambda c, s=spans: write_spans(c, s))
        advantages = [Advantage(s.index, i - 1.5) for i, s in enumerate(groups[0])]
        writer.submit("advantages", lambda c, k=step, a=advantages: write_advantages(c, k, a))
        counts = {"ratio": [*[0] * 9, 2, 18, 4, *[0] * 9], "entropy": [6 + step, 12, 6, *[0] * 21]}
        writer.submit("histograms", lambda c, k=step, h=counts: write_histograms(c, k, [h, h]))
        lines += metric_lines(step, at)
    writer.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_system_curves(folder / "system.jsonl")
    log = ["[2026-09-21 12:53:20] start.py:1 - INFO: it begins"]
    if advice:
        log.append(
            "[2026-09-21 12:54:20] cluster.py:1 - WARNING: advice: 75% of the answers were cut; raise it."
        )
    (folder / "logs" / "driver.log").write_text("\n".join(log) + "\n")
    return folder


def write_system_curves(file: Path, readings=24) -> None:
    """What a driver, a rank and two engines used; only the rank has a GPU."""
    with file.open("w") as lines:
        for number in range(readings):
            line = {"time": START + 5 * number, "step_key": "system/time", "step": int(START) + 5 * number}
            for place, name in enumerate(("driver", "trainer-0", "engine-0", "engine-1")):
                line[f"system/{name}/cpu_cores"] = (0.1, 1.0, 0.8, 0.7)[place] + 0.1 * (number % 4)
                line[f"system/{name}/memory_gib"] = 0.4 + place
            line |= {"system/trainer-0/gpu_percent": 60 + number, "system/trainer-0/gpu_memory_gib": 61.5}
            lines.write(json.dumps(line) + "\n")


def make_image_run(folder: Path) -> Path:
    """A run of one group whose prompt shows a picture; its second response also shows one by a tool."""
    from PIL import Image

    make_run(folder, 1)
    writer = RecordWriter(folder / "record.db", "abc", 256 << 20)
    red, blue = Image.new("RGB", (40, 30), "#c22"), Image.new("RGB", (900, 600), "#22c")
    texts = {
        200: "<|im_start|>user\n<|vision_start|>",
        201: "<|image_pad|>",
        202: "<|vision_end|>Which colour is it?<|im_end|>\n<|im_start|>assistant\n",
        203: "It is ",
        204: "red.",
        205: "<|im_end|>\n<|im_start|>tool\n<|vision_start|>",
        206: "<|vision_end|><|im_end|>\n<|im_start|>assistant\n",
    }
    samples = []
    for copy, response in enumerate(([203, 204], [203, 205, 201, 206, 204])):
        sampled = [int(token in (203, 204)) for token in response]
        samples.append(
            Sample(
                group_index=95,
                index=950 + copy,
                prompt="Which colour is it?",
                tokens=[200, *[201] * 4, 202, *response],
                response="".join(texts[i] for i in response),
                response_length=len(response),
                reward=float(copy),
                rollout_log_probs=[-0.1 * one for one in sampled],
                loss_mask=sampled,
                version_spans=[("run:1", i, i + 1) for i, one in enumerate(sampled) if one],
                multimodal_inputs={"images": [red, blue][: copy + 1]},
                status=Sample.Status.COMPLETED,
            )
        )
    book = PieceBook(lambda ids: [texts[i] for i in ids])
    writer.add("train", 1, group_entries(samples, "trained"), version="run:1")
    writer.submit("pieces", lambda connection: book.write(connection, samples))
    writer.close()
    return folder


# Token id -> text, of an episode with a tool call, its result, and a fork after the first turn.
EPISODE_TEXTS = {
    100: "<|im_start|>system\nUse the tool.<|im_end|>\n<|im_start|>user\nWhat is 12*3?<|im_end|>\n",
    101: "<|im_start|>assistant\n",
    102: "I will calculate. ",
    103: '<tool_call>{"name": "calculate", "arguments": {"expression": "12*3"}}</tool_call>',
    104: "<|im_end|>\n<|im_start|>user\n<tool_response>\n36 <img src=x>\n</tool_response><|im_end|>\n",
    105: "It is 36.",
    106: "It is 63.",
    107: "<|im_end|>",
}


def make_agent_run(folder: Path) -> Path:
    """A run of one group: an episode of two branches that share the first turn, and one of a single turn."""
    make_run(folder, 1)
    writer = RecordWriter(folder / "record.db", "abc", 256 << 20)
    turn = {"start": 0, "end": 2, "trained": True, "finish": "tool_calls", "tool_calls": ["calculate"]}
    first = {"turn": 0, **turn, "engine_s": 0.5, "other_s": 0.0, "reward": 0.25}
    samples = []
    for copy, (number, token) in enumerate(((1, 105), (2, 106))):
        last = {"turn": number, "start": 4, "end": 6, "trained": True, "finish": "stop", "tool_calls": []}
        samples.append(
            Sample(
                group_index=90,
                index=900 + copy,
                rollout_id=900,
                prompt="What is 12*3?",
                tokens=[100, 101, 102, 103, 104, 101, token, 107],
                response="".join(EPISODE_TEXTS[i] for i in (102, 103, 104, 101, token, 107)),
                response_length=6,
                label="36",
                reward=float(copy == 0),
                rollout_log_probs=[-0.1, -2.0, 0.0, 0.0, -0.5, -0.1],
                loss_mask=[1 - copy, 1 - copy, 0, 0, 1, 1],
                version_spans=[*[("run:1", 0, 2)][copy:], ("run:2", 4, 6)],
                metadata={"turns": [{**first, "trained": copy == 0}, {**last, "other_s": 1.5}]},
                status=Sample.Status.COMPLETED,
            )
        )
    book = PieceBook(lambda ids: [EPISODE_TEXTS[i] for i in ids])
    writer.add("train", 1, group_entries([samples], "trained"), version="run:2")
    writer.submit("pieces", lambda connection: book.write(connection, samples))
    writer.close()
    return folder


def metric_lines(step, at):
    origin = {"run": "abc", "start": 1, "step": step}
    rollout = {
        "rollout/raw_reward": step / 10,
        "rollout/response_len/mean": 6.0,
        "rollout/groups/kept": 1,
        "rollout/groups/filtered": 1,
        "rollout/groups/issued": 2,
        "rollout/staleness/mean": 0.5,
        "perf/rollout_time": 5.0,
        "perf/step_time": 10.0,
        "perf/train_wait_time": 5.0,
        "perf/tokens_per_gpu_per_sec": 100.0 + step,
    }
    train = {"train/loss": -step / 100, "train/grad_norm": 1.0}
    return [
        {"time": at + 9, **origin, "step_key": "rollout/step", "rollout/step": step, **rollout},
        {"time": at + 9, **origin, "step_key": "train/step", "train/step": step, **train},
    ]


def _fields(start):
    return {name: getattr(start, name) for name in Start.__slots__}


@contextlib.contextmanager
def serving(*folders: Path, host="127.0.0.1", may_act=True):
    """The address of a page over these runs, its token, and the page."""
    access, started, ended = Access(host), threading.Event(), threading.Event()
    page = Page(open_runs(list(folders)), access, may_act=may_act)
    found = {}

    async def serve():
        runner = web.AppRunner(page.app(), access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        found["port"] = site._server.sockets[0].getsockname()[1]
        started.set()
        while not ended.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        # A busy machine finds all there is, too.
        with (
            mock.patch.object(sample_pages, "_DEADLINE_S", PATIENCE_S),
            mock.patch.object(distributions, "_LONGEST_S", PATIENCE_S),
        ):
            yield f"http://127.0.0.1:{found['port']}", access.token
    finally:
        ended.set()
        thread.join(60)
