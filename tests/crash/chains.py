"""Chains of kills: a tiny deterministic run is killed at random points, started again by the same command
until it is finished, and held against an undisturbed one. `make test-crash` runs this file.

    python tests/crash/chains.py --kills 200 --seed 0 --folder /tmp/crash --table crash.md

0 lost, 0 trained twice (`slime ledger audit`), the same ledger (its digest: tokens, log-probs, rewards,
versions, drops, evaluations), the same metrics and the same bits in the last checkpoint.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from crash.victim import POINTS, TARGETS  # noqa: E402
from loop_helpers import flags, series  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

POOL = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
MODES = {
    "train.py": {"script": "train.py"},
    "train_async.py": {"script": "train_async.py"},
    "fully asynchronous": {
        "script": "train_async.py",
        "rollout_function_path": POOL,
        "max_weight_staleness": 2,
    },
}
REWARD = '''
"""The share of letters 'a', different between samples; a comparison in a worker process is part of it."""
from slime.rollout.rm_hub.workers.checks import check


async def reward(args, sample, **kwargs):
    await check(args, sample, "slime.rollout.rm_hub.f1.f1_reward", sample.response, "a b c", wrong=0.0)
    return sample.response.count("a") / max(1, sample.response_length) + 0.01 * (sample.index % 7)
'''
# Never the same in two runs, killed or not: times, and what was in a cache.
_TIMED = ("perf/", "time", "prefix_cache", "cached", "non_generation", "_s/", "queue", "step_time")
PATIENCE_S = 900


@dataclass
class Result:
    """One chain: the kills that struck, and what differs from the undisturbed run."""

    mode: str
    kills: list[dict] = field(default_factory=list)
    starts: int = 0
    wrong: list[str] = field(default_factory=list)


def make_world(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model")
    rows = "".join(json.dumps({"input": f"say a {i}", "label": str(i)}) + "\n" for i in range(40))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "eval.jsonl").write_text("".join(rows.splitlines(keepends=True)[:2]))
    (folder / "reward.py").write_text(REWARD)
    return folder


def settings(world: Path, run: str, mode: str, num_rollout: int) -> tuple[str, list[str]]:
    values = dict(MODES[mode])
    script = values.pop("script")
    more = {
        "num_rollout": num_rollout,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "rollout_max_response_len": 6,
        "deterministic_mode": True,
        "save": world / f"{run}-ckpt",
        "save_interval": 2,
        "eval_interval": 2,
        "eval_prompt_data": ["held", world / "eval.jsonl"],
        "skip_preflight": ["reward", "lengths", "machine"],
    }
    return script, flags(world, run, **more, **values)


def start(world: Path, run: str, mode: str, num_rollout: int, plan: dict | None) -> int:
    """One start of the run, to its end; the exit code."""
    script, words = settings(world, run, mode, num_rollout)
    root = TESTS.parent
    first = [sys.executable, str(root / script)]
    if plan is not None:
        first = [sys.executable, str(TESTS / "crash" / "victim.py"), json.dumps(plan), script]
    with open(world / f"{run}.out", "a") as log:
        log.write(f"--- {json.dumps(plan)}\n")
        log.flush()
        return subprocess.run(
            [*first, *words], stdout=log, stderr=log, cwd=root, timeout=PATIENCE_S, check=False
        ).returncode


def draw_plan(draw: random.Random, world: Path, run: str, num_rollout: int) -> dict:
    point = draw.choice(list(POINTS))
    often = {"generation": 12, "scoring": 12, "ledger write": 40}
    return {
        "point": point,
        "nth": draw.randint(1, often.get(point, 2)),
        "delay_s": draw.choice([0, 0, 0.003, 0.03, 0.2]),
        "target": draw.choices(list(TARGETS), [3, 1, 2, 1])[0],
        "note": str(world / f"{run}.struck"),
    }


def chain(world: Path, run: str, mode: str, num_rollout: int, draw: random.Random, most: int) -> Result:
    """Kill and start again until the run is finished; from `most` kills on it is left in peace."""
    result, note = Result(mode), world / f"{run}.struck"
    code: int | None = None
    while code != 0:
        plan = draw_plan(draw, world, run, num_rollout) if len(result.kills) < most else None
        note.unlink(missing_ok=True)
        code = start(world, run, mode, num_rollout, plan)
        result.starts += 1
        if note.exists():
            result.kills.append({**json.loads(note.read_text()), "exit": code})
        elif code != 0:
            result.wrong.append(f"start {result.starts} ended with {code} and nothing was struck")
            break
    result.wrong += differences(world, run, f"reference-{mode.replace(' ', '-')}", num_rollout)
    return result


def differences(world: Path, run: str, reference: str, num_rollout: int) -> list[str]:
    """What a chain and the undisturbed run do not have in common."""
    found, wanted = audit(world, run), audit(world, reference)
    wrong = [f"audit: {violation}" for violation in found["violations"]]
    for key in ("digest", "steps", "num_samples"):
        if found[key] != wanted[key]:
            wrong.append(f"ledger: {key} is {found[key]}, undisturbed {wanted[key]}")
    names = metric_names(world, reference)
    if names != metric_names(world, run):
        wrong.append(f"metrics: only one of the runs has {sorted(names ^ metric_names(world, run))[:5]}")
    for name in sorted(names):
        ours, theirs = series(world, run, name), series(world, reference, name)
        if not same(ours, theirs):
            odd = [step for step in theirs if not same({0: ours.get(step)}, {0: theirs[step]})]
            wrong.append(f"metrics: {name} differs at {odd[:4]}")
    ours, theirs = (weights_of(world / f"{name}-ckpt") for name in (run, reference))
    if ours != theirs:
        wrong.append(f"checkpoint: {sorted(k for k in theirs if ours.get(k) != theirs[k])[:3]} differ")
    return wrong


def same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(ours.values(), theirs.values(), strict=True)
    )


def metric_names(world: Path, run: str) -> set[str]:
    """Of numbers that a run repeats."""
    names: set[str] = set()
    for line in (world / run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names |= {k for k, v in row.items() if isinstance(v, (int, float)) and "/" in k}
    return {n for n in names if not any(word in n for word in _TIMED) and not n.endswith("/step")}


def audit(world: Path, run: str) -> dict:
    words = [sys.executable, "-m", "slime", "ledger", "audit", str(world / run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    return json.loads(done.stdout)


def weights_of(folder: Path) -> dict[str, str]:
    """Every tensor and random state of the last checkpoint, by its checksum."""
    import hashlib

    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    last = max(p for p in folder.iterdir() if p.name.startswith("step_") and "." not in p.name)
    state: dict = {}
    _load_state_dict(
        state, FileSystemReader(last / "trainer"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    found = {}

    def walk(value, name):
        if isinstance(value, torch.Tensor):
            data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            found[name] = hashlib.blake2b(data, digest_size=8).hexdigest()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}/{key}")
        elif isinstance(value, (int, float, str)):
            found[name] = repr(value)

    walk(state, last.name)
    assert len(found) > 5, "a checkpoint has tensors"
    return found


def reference(world: Path, mode: str, num_rollout: int) -> str:
    name = f"reference-{mode.replace(' ', '-')}"
    if not (world / f"{name}.done").exists():
        code = start(world, name, mode, num_rollout, None)
        assert code == 0, (world / f"{name}.out").read_text()[-3000:]
        (world / f"{name}.done").touch()
    return name


def table(results: list[Result]) -> str:
    lines = [
        "| what was running | kills | starts | lost or trained twice | other ends |",
        "|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(r.mode for r in results):
        own = [r for r in results if r.mode == mode]
        bad = sum(any("audit" in w for w in r.wrong) for r in own)
        other = sum(any("audit" not in w for w in r.wrong) for r in own)
        kills, starts = sum(len(r.kills) for r in own), sum(r.starts for r in own)
        lines.append(f"| `{mode}`, {len(own)} chains | {kills} | {starts} | {bad} | {other} |")
    kills = [kill for r in results for kill in r.kills]
    for title, key in (("where", "point"), ("which process", "target")):
        counts = Counter(kill[key] for kill in kills)
        lines += ["", f"{title}: " + ", ".join(f"{what} {n}" for what, n in counts.most_common())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="how many at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=4, help="of each run")
    parser.add_argument("--most", type=int, default=6, help="kills of one run")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new chain after so long")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    world, began = options.folder, time.monotonic()
    if not (world / "reward.py").exists():
        make_world(world)
    results: list[Result] = []
    draw = random.Random(options.seed)
    while sum(len(r.kills) for r in results) < options.kills:
        if (time.monotonic() - began) / 60 > options.minutes:
            break
        mode = options.modes[len(results) % len(options.modes)]
        reference(world, mode, options.rollouts)
        run = f"chain-{options.seed}-{len(results)}"
        result = chain(world, run, mode, options.rollouts, draw, options.most)
        results.append(result)
        what = ", ".join(f"{k['target']} at {k['point']}" for k in result.kills)
        print(f"{run} ({mode}): {result.starts} starts, {len(result.kills)} kills: {what}", flush=True)
        for wrong in result.wrong:
            print(f"    WRONG: {wrong}", flush=True)
        (world / f"results-{options.seed}.json").write_text(json.dumps([vars(r) for r in results]))
        if not result.wrong:
            shutil.rmtree(world / run, ignore_errors=True)
            shutil.rmtree(world / f"{run}-ckpt", ignore_errors=True)
    text = table(results)
    print(text)
    if options.table:
        options.table.write_text(text + "\n")
    return 1 if any(r.wrong for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
