"""Chains of kills: a tiny deterministic run is killed at random points, started again by the same command
until it is finished, and held against an undisturbed one. `make test-crash` runs this file.

    python tests/crash/chains.py --kills 200 --seed 0 --folder /tmp/crash --table crash.md
    python tests/crash/chains.py --folder /tmp/crash --sum     # the table of all seeds that were run there

0 lost, 0 trained twice (`slime ledger audit`, after every start), the same ledger (its digest: tokens,
log-probs, rewards, versions, drops, evaluations), the same metrics and the same bits in the last checkpoint.
Processes are forked from one that has imported what they need (`warm_start.py`).
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS.parent)]

import warm_start  # noqa: E402
from loop_helpers import flags, series  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

from slime.record import record_file  # noqa: E402
from slime.record.audit import Audit, audit  # noqa: E402
from slime.utils.files.run_file import read_run  # noqa: E402
from slime.utils.machine.ports import find_available_port  # noqa: E402
from tests.crash.victim import POINTS, TARGETS  # noqa: E402

POOL = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
LOCAL = "a local disk that the next start does not see"
MODES = {
    "train.py": {"script": "train.py"},
    "train_async.py": {"script": "train_async.py"},
    "fully asynchronous": {
        "script": "train_async.py",
        "rollout_function_path": POOL,
        "max_weight_staleness": 2,
    },
    "fully asynchronous, each start on another host": {
        "script": "train_async.py",
        "rollout_function_path": POOL,
        "max_weight_staleness": 2,
        "record_dir": LOCAL,
    },
    "Megatron, two tensor-parallel ranks": {
        "script": "train_async.py",
        "train_backend": "megatron",
        "tensor_model_parallel_size": 2,
        "actor_num_gpus_per_node": 2,
        "peer_copies": 1,
    },
    "Megatron, from its checkpoints": {
        "script": "train_async.py",
        "train_backend": "megatron",
        "tensor_model_parallel_size": 2,
        "actor_num_gpus_per_node": 2,
    },
    "SGLang behind its router": {
        "script": "train_async.py",
        "rollout_engine": "sglang",
        "rollout_router": "sglang",
        "timeouts": "engine-start=900",
    },
}
AGENT = {
    "script": "train.py",
    "prompt_data": None,
    "label_key": None,
    "custom_rm_path": None,
    "eval_prompt_data": None,
    "eval_env_num_items": 2,
    "rollout_max_response_len": 160,
    "turn_max_response_len": 4,
}
# Episodes of twelve turns, of environments that write what each step did into a file outside of the run.
MODES |= {
    "an environment that recognises repeated steps": {**AGENT, "env": "garden.py:Garden"},
    "an environment whose steps are never repeated": {**AGENT, "env": "garden.py:Once"},
}
# Generate functions with a session of twelve turns.
SESSION = {"script": "train.py", "custom_rm_path": None, "rollout_max_response_len": 160}
MODES |= {
    what: {**SESSION, "custom_generate_function_path": f"agent.py:{function}"}
    for what, function in {
        "a session whose tool calls are never repeated": "once",
        "a session whose tool recognises repeated calls": "again",
        "a session with a sandbox": "in_a_sandbox",
        "the openai SDK, in a program that ends with the run": "with_program",
        "the openai SDK, in a program that outlives the run": "with_outliving_program",
    }.items()
}
MODES["sessions with tools in rollout workers"] = {
    **MODES["a session whose tool calls are never repeated"],
    "rollout_workers": 2,
}
AGENTS = [mode for mode, values in MODES.items() if values.get("rollout_max_response_len") == 160]
ALWAYS = list(MODES)[:4]
MORE_WEIGHTS = {
    "SGLang behind its router": {"router": 3},
    "the openai SDK, in a program that ends with the run": {"agent program": 3},
    "sessions with tools in rollout workers": {"rollout worker": 6},
}
# Engines that promise no bits: what is trained on is conserved, and need not be the same.
CONSERVES_ONLY = ("SGLang behind its router",)
REWARD = '''
"""The share of letters 'a', different between samples; a comparison in a worker process is part of it."""
from slime.rollout.rm_hub.hub import check


async def reward(args, sample, **kwargs):
    await check(args, sample, "slime.rollout.rm_hub.f1.f1_reward", sample.response, "a b c", wrong=0.0)
    return sample.response.count("a") / max(1, sample.response_length) + 0.01 * (sample.index % 7)
'''
GARDEN = '''
"""An environment of twelve turns; each step is an effect outside of the run, with the id of its call."""
import os
from pathlib import Path

from slime.agent.environments.protocol import StepResult


class Once:
    def __init__(self):
        self.turn = self.total = 0
        self.effects = Path(os.environ["GARDEN_EFFECTS"])

    def reset(self, item):
        self.seed = item.seed
        return f"plot {item.seed % 7}"

    def step(self, action, call_id):
        self.act(call_id)
        self.turn, self.total = self.turn + 1, self.total + action.count("a")
        return StepResult(f"n{self.turn} {self.total}", reward=action.count("a") / 4, done=self.turn == 12)

    def act(self, call_id):
        with open(self.effects, "a") as file:
            file.write(f"{call_id}\\n")

    def score(self):
        return 0.01 * (self.total % 5) + 0.001 * (self.seed % 3)

    def save(self):
        return {"turn": self.turn, "total": self.total, "seed": self.seed}

    def restore(self, item, state):
        self.turn, self.total, self.seed = state["turn"], state["total"], state["seed"]


class Garden(Once):
    repeatable = True

    def act(self, call_id):
        if not self.effects.exists() or call_id not in self.effects.read_text().split():
            super().act(call_id)
'''
AGENT_FUNCTIONS = '''
"""Agents of twelve turns, each followed by a call of a tool; a call is an effect outside of the run."""
import asyncio
import os
import subprocess
from pathlib import Path

from slime.agent.adapters import adapter_of
from slime.agent.session import Budget, Session, seed_of_episode
from slime.agent.tools import BoxTools, ToolSet, call_id

WORLD = Path(__file__).parent
BUDGET = Budget(max_new_tokens=4)


def plant(text: str) -> str:
    """Plants."""
    if call_id() is not None:  # of an evaluation nothing is recorded
        with open(os.environ["GARDEN_EFFECTS"], "a") as file:
            file.write(f"{call_id()}\\n")
    return f"n{text.count('a')}"


def plant_again(text: str) -> str:
    """Plants what it has not planted."""
    effects = Path(os.environ["GARDEN_EFFECTS"])
    if effects.exists() and call_id() in effects.read_text().split():
        return f"n{text.count('a')}"
    return plant(text)


plant_again.repeatable = True


async def once(args, sample, params):
    return await play(args, sample, params, ToolSet([plant]))


async def again(args, sample, params):
    return await play(args, sample, params, ToolSet([plant_again]))


async def in_a_sandbox(args, sample, params):
    async with BoxTools(args.sandbox) as box:
        made = await play(args, sample, params, ToolSet([box.shell]), "echo {turn} >> log; wc -l < log")
        lines = (await (await box.box()).read_file("/work/log")).split()
    assert set(lines) == {str(turn) for turn in range(12)}, lines
    with open(os.environ["GARDEN_EFFECTS"], "a") as file:
        file.write("".join(f"{sample.session_id}.{os.getpid()}.{line}\\n" for line in lines))
    return made


async def play(args, sample, params, tools, command=None):
    session = Session.of_run(args, sample, params, budget=BUDGET)
    [name] = tools.by_name
    messages = [{"role": "user", "content": str(sample.prompt)}]
    for turn in range(12):
        answer = await session.turn(messages)
        arguments = {"text": answer.text} if command is None else {"command": command.format(turn=turn)}
        function = {"name": name, "arguments": arguments}
        [result] = await tools.answer([{"id": f"{session.session_id}-{turn}", "function": function}])
        messages += [answer.message, {"role": "user", "content": result["content"]}]
    said = "".join(message["content"] for message in messages if message["role"] == "assistant")
    return session.samples(sample, reward=reward(sample, said), extra_metadata=tools.counts, args=args)


def reward(sample, said):
    return said.count("a") / len(said or " ") + 0.01 * (int(sample.index) % 7)


async def with_program(args, sample, params):
    return await with_client(args, sample, params, outlives=False)


async def with_outliving_program(args, sample, params):
    return await with_client(args, sample, params, outlives=True)


async def with_client(args, sample, params, outlives):
    key = sample.session_id
    adapter = await adapter_of(args, port=int(os.environ["AGENT_PORT"]) if outlives else 0)
    session = adapter.open_session(key, params, budget=BUDGET, seed=seed_of_episode(args, sample))
    said, pid = WORLD / f"{key}.said", WORLD / f"{key}.pid"
    try:
        if not (outlives and pid.exists() and Path(f"/proc/{pid.read_text()}").exists()):
            words = [os.environ["AGENT_PYTHON"], WORLD / "program.py", "outlives" if outlives else "ends"]
            words += [adapter.url, key, sample.prompt, said]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
            pid.write_text(str(process.pid))
        while not said.exists():
            if has_ended(int(pid.read_text())) and not said.exists():
                raise ConnectionError("the program has ended")
            await asyncio.sleep(0.05)
        return await adapter.finish_session(
            key, base_sample=sample, reward=reward(sample, said.read_text()), args=args
        )
    finally:
        if adapter.session(key) is session:
            await asyncio.shield(adapter.shutdown_session(key))
            adapter.drop_session(key)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
'''
PROGRAM = '''
"""An agent with the openai SDK: twelve requests; one that outlives the run notes each as an effect."""
import os
import sys
import threading
from pathlib import Path

from openai import OpenAI

how, url, key, prompt, said = sys.argv[1:]
if how == "ends":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=100)
messages = [{"role": "user", "content": prompt}]
for turn in range(12):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if how == "outlives":
        with open(os.environ["GARDEN_EFFECTS"], "a") as file:
            file.write(f"{key}.{turn}\\n")
    messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": f"n{turn}"}]
part = Path(f"{said}.part")
part.write_text("".join(message["content"] for message in messages if message["role"] == "assistant"))
part.replace(said)
'''
# Never the same in two runs, killed or not: times, and what was in a cache.
_TIMED = (
    "perf/",
    "time",
    "seconds",
    "env_share",
    "waste/",
    "prefix_cache",
    "cached",
    "non_generation",
    "_s/",
    "queue",
    "step_time",
)
PATIENCE_S = 900
# Kills that a run survives, and how often each process is chosen.
MILD = ("engine", "reward worker", "router", "agent program", "rollout worker")
WEIGHTS = {
    "driver": 5,
    "engine": 3,
    "trainer": 3,
    "reward worker": 2,
    "router": 0,
    "agent program": 0,
    "rollout worker": 0,
}
OFTEN = {"generation": 10, "scoring": 10, "ledger write": 10}
TURNS = ["step of an environment", "call recorded", "result recorded", "generation"]
SESSION_TURNS = ["turn of a session", "turn recorded", "tool call", "result of a tool call"]
OFTEN_IN_AGENTS = {**dict.fromkeys(TURNS, 140), **dict.fromkeys(SESSION_TURNS, 60), "ledger write": 10}
OFTEN_IN_AGENTS["event of a rollout worker"] = 200


@dataclass
class Result:
    """One chain: the kills that struck, and what differs from the undisturbed run."""

    mode: str
    kills: list[dict] = field(default_factory=list)
    starts: int = 0
    wrong: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # where the same was not promised
    episodes: list[int] = field(default_factory=lambda: [0, 0])  # that continued, and that started again


def make_world(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model")
    rows = "".join(json.dumps({"input": f"say a {i}", "label": str(i)}) + "\n" for i in range(40))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "eval.jsonl").write_text("".join(rows.splitlines(keepends=True)[:2]))
    (folder / "reward.py").write_text(REWARD)
    (folder / "garden.py").write_text(GARDEN)
    (folder / "agent.py").write_text(AGENT_FUNCTIONS)
    (folder / "program.py").write_text(PROGRAM)
    return folder


def settings(world: Path, run: str, mode: str, num_rollout: int) -> tuple[str, list[str]]:
    values = dict(MODES[mode])
    script = values.pop("script")
    for name in ("env", "custom_generate_function_path"):
        values |= {name: world / values[name]} if name in values else {}
    values |= {"record_dir": world / f"{run}-local"} if values.get("record_dir") == LOCAL else {}
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
        "limits": "engine-restarts=50",
        "skip_preflight": ["reward", "lengths", "machine"],
    }
    return script, flags(world, run, **{**more, **values})


def start(world: Path, run: str, mode: str, num_rollout: int, plans: list[dict]) -> int | None:
    """One start of the run, to its end; the exit code, None: it hung."""
    script, words = settings(world, run, mode, num_rollout)
    root = TESTS.parent
    first = [sys.executable, str(root / script)]
    if plans:
        victim = str(TESTS / "crash" / "victim.py")
        first = [sys.executable, victim, json.dumps(plans), str(world / f"{run}.struck"), script]
    search = os.pathsep.join(filter(None, [str(root), str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    environment["GARDEN_EFFECTS"] = str(world / f"{run}.effects")
    environment.setdefault("AGENT_PYTHON", str(root / ".venv-agents/bin/python"))  # with the openai SDK
    port = world / f"{run}.port"  # the same in all starts
    if not port.exists():
        port.write_text(str(find_available_port()))
    environment["AGENT_PORT"] = port.read_text()
    with open(world / f"{run}.out", "a") as log:
        log.write(f"--- {json.dumps(plans)}\n")
        log.flush()
        try:
            return subprocess.run(
                [*first, *words],
                stdout=log,
                stderr=log,
                cwd=root,
                env=environment,
                timeout=PATIENCE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def draw_plans(draw: random.Random, mode: str) -> list[dict]:
    """Up to four strikes of one start; those after one that ends the run are never reached."""
    weights = {**WEIGHTS, **MORE_WEIGHTS.get(mode, {})}
    turns = TURNS if "env" in MODES[mode] else SESSION_TURNS[: 2 if "SDK" in mode else None]
    turns = ["event of a rollout worker"] if "rollout_workers" in MODES[mode] else turns
    return [
        {
            "point": (
                point := draw.choice(turns if mode in AGENTS and draw.random() < 0.7 else list(POINTS))
            ),
            "nth": draw.randint(1, (OFTEN_IN_AGENTS if mode in AGENTS else OFTEN).get(point, 2)),
            "delay_s": draw.choice([0, 0, 0.003, 0.03, 0.2]),
            "target": draw.choices(list(TARGETS), [weights[target] for target in TARGETS])[0],
        }
        for _ in range(draw.randint(2, 4))
    ]


def chain(world: Path, run: str, mode: str, num_rollout: int, draw: random.Random, most: int) -> Result:
    """Kill and start again until the run is finished; from `most` kills on it is left in peace."""
    result, note = Result(mode), world / f"{run}.struck"
    code: int | None = -1
    while code != 0 and not result.wrong:
        plans = draw_plans(draw, mode) if len(result.kills) < most else []
        note.unlink(missing_ok=True)
        code = start(world, run, mode, num_rollout, plans)
        result.starts += 1
        shutil.rmtree(world / f"{run}-local", ignore_errors=True)
        struck = [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else []
        result.kills += [{**kill, "exit": code} for kill in struck]
        if code is None:
            result.wrong.append(f"start {result.starts} hung; struck was {struck}")
        elif code != 0 and all(kill["target"] in MILD for kill in struck) and has_begun(world, run):
            result.wrong.append(f"start {result.starts} ended with {code}; struck was {struck}")
        elif record_file(world / run).exists():
            result.wrong += [
                f"audit after start {result.starts}: {v}" for v in audited(world, run).violations
            ]
    if not result.wrong:
        found = differences(world, run, reference_of(mode))
        same_promised = mode not in CONSERVES_ONLY
        result.wrong += [line for line in found if same_promised or line.startswith("audit")]
        result.differs += [line for line in found if line not in result.wrong]
        last = audited(world, run)
        result.episodes = [last.continued, last.restarted]
    return result


def has_begun(world: Path, run: str) -> bool:
    """Whether the last start got its engines: one that dies before it served ends the start with its log."""
    return "first push" in (world / f"{run}.out").read_text().rpartition("\n--- [")[2]


def reference_of(mode: str) -> str:
    return "reference-" + mode.replace(" ", "-").replace(",", "")


def differences(world: Path, run: str, reference: str) -> list[str]:
    """What a chain and the undisturbed run do not have in common."""
    found, wanted = audited(world, run), audited(world, reference)
    wrong = [f"audit: {violation}" for violation in found.violations]
    effects = world / f"{run}.effects"
    twice = Counter(effects.read_text().split()) if effects.exists() else Counter[str]()
    wrong += [f"audit: the effect of {call} happened {n} times" for call, n in twice.items() if n > 1]
    for key in ("digest", "steps", "num_samples"):
        ours, theirs = getattr(found, key), getattr(wanted, key)
        if ours != theirs:
            wrong.append(f"ledger: {key} is {ours}, undisturbed {theirs}")
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


def audited(world: Path, run: str) -> Audit:
    """As `slime ledger audit` does."""
    started = read_run(world / run)
    is_finished = started is not None and started.last.exit == "finished"
    return audit(record_file(world / run), finished=is_finished)


def weights_of(folder: Path) -> dict[str, str]:
    """Every tensor and random state of the last checkpoint, by its checksum."""
    import hashlib

    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    last = max(p for p in folder.iterdir() if p.name.startswith("step_") and "." not in p.name)
    [metadata] = (last / "trainer").rglob(".metadata")
    state: dict = {}
    _load_state_dict(
        state, FileSystemReader(metadata.parent), planner=_EmptyStateDictLoadPlanner(), no_dist=True
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
    name = reference_of(mode)
    if not (world / f"{name}.done").exists():
        code = start(world, name, mode, num_rollout, [])
        assert code == 0, (world / f"{name}.out").read_text()[-3000:]
        (world / f"{name}.done").touch()
    return name


def table(results: list[Result]) -> str:
    """What was seen, as Markdown: by way of running, then by place and process."""
    lines = [
        "| what was running | chains | kills | starts | lost, trained or called twice | other ends "
        "| episodes continued, restarted |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(r.mode for r in results):
        own = [r for r in results if r.mode == mode]
        bad = sum(any(w.startswith("audit") for w in r.wrong) for r in own)
        other = sum(any(not w.startswith("audit") for w in r.wrong) for r in own)
        kills, starts = sum(len(r.kills) for r in own), sum(r.starts for r in own)
        continued, restarted = (sum(r.episodes[n] for r in own) for n in (0, 1))
        lines.append(
            f"| {mode} | {len(own)} | {kills} | {starts} | {bad} | {other} | {continued}, {restarted} |"
        )
    counts = Counter((kill["point"], kill["target"]) for r in results for kill in r.kills)
    targets = [target for target in TARGETS if any(t == target for _, t in counts)]
    lines += ["", "| where | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for point in POINTS:
        lines.append(f"| {point} | " + " | ".join(str(counts[point, t]) for t in targets) + " |")
    return "\n".join(lines)


def sum_up(world: Path) -> str:
    """The table of every seed that was run in this folder."""
    rows = [row for path in sorted(world.glob("results-*.json")) for row in json.loads(path.read_text())]
    return table([Result(**row) for row in rows])


def run_chains(world: Path, options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    began, draw = time.monotonic(), random.Random(options.seed)
    while sum(len(r.kills) for r in results) < options.kills:
        if (time.monotonic() - began) / 60 > options.minutes:
            break
        mode = options.modes[(options.seed + len(results)) % len(options.modes)]
        reference(world, mode, options.rollouts)
        run = f"chain-{options.seed}-{len(results)}"
        result = chain(world, run, mode, options.rollouts, draw, options.most)
        results.append(result)
        what = ", ".join(f"{k['target']} at {k['point']}" for k in result.kills)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{run} ({mode}): {result.starts} starts, {len(result.kills)} kills: {what}", flush=True)
        print(f"    {time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU s", flush=True)
        for wrong in result.wrong:
            print(f"    WRONG: {wrong}", flush=True)
        for line in result.differs[:6]:
            print(f"    other than undisturbed: {line}", flush=True)
        (world / f"results-{options.seed}.json").write_text(json.dumps([vars(r) for r in results]))
        if not result.wrong:
            shutil.rmtree(world / run, ignore_errors=True)
            shutil.rmtree(world / f"{run}-ckpt", ignore_errors=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="how many at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=6, help="of each run")
    parser.add_argument("--most", type=int, default=8, help="kills of one run")
    parser.add_argument("--modes", nargs="+", default=ALWAYS, choices=list(MODES))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new chain after so long")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--sum", action="store_true", help="run nothing; the table of what was run before")
    options = parser.parse_args()
    world = options.folder
    if options.sum:
        print(sum_up(world))
        return 0
    warm_start.install()
    if not (world / "reward.py").exists():
        make_world(world)
    results = run_chains(world, options)
    print(table(results))
    if options.table:
        options.table.write_text(table(results) + "\n")
    return 1 if any(r.wrong for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
