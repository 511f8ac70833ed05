"""A run that kills some of its own processes at chosen points, as SIGKILL would from outside.

    python tests/crash/victim.py '[{"point": "push", "nth": 2, "delay_s": 0.01, "target": "trainer"}]' \\
        struck.jsonl train.py FLAGS...

At the nth time that the point of a plan is reached, and a moment later, its target gets SIGKILL. What was
struck is noted in a file. The points are functions of the driver, which are wrapped here and nowhere else.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

# Point -> where it is: a function that every run of the kind passes.
POINTS = {
    "generation": "slime.rollout.sglang_rollout:generate",
    "scoring": "slime.rollout.sglang_rollout:score_samples",
    "ledger write": "slime.record.ledger_rows:_write_finished",
    "rollout handed over": "slime.rollout.ledger:Ledger.made",
    "step of an environment": "slime.agent.environments.episode:Episode._step",
    "call recorded": "slime.rollout.episode_record:EpisodeRecord.called",
    "result recorded": "slime.rollout.episode_record:EpisodeRecord.replied",
    "turn of a session": "slime.agent.session:Session.generate",
    "turn recorded": "slime.rollout.episode_record:EpisodeRecord.add_turn",
    "tool call": "slime.agent.tools.registry:ToolSet._result",
    "result of a tool call": "slime.agent.tools.registry:shorten",
    "event of a rollout worker": "slime.rollout.ledger:Ledger.forward",
    "step": "slime.cluster.training.train_group:TrainGroup.train",
    "step consumed": "slime.rollout.ledger:Ledger.trained",
    "checkpoint begun": "slime.cluster.checkpoints.saving:stage_checkpoint",
    "checkpoint completed": "slime.cluster.checkpoints.checkpoint:StagedCheckpoint.complete",
    "checkpoint before its rename": "slime.cluster.checkpoints.checkpoint:_set_aside",
    "checkpoint after its rename": "slime.cluster.rollout_manager:RolloutManager.note_committed",
    "push": "slime.cluster.weight_push:WeightPush.push",
    "evaluation": "slime.cluster.rollout_manager:RolloutManager.evaluate",
}
# Target -> what its command line holds, one of several; the driver is this process.
TARGETS: dict[str, tuple[str, ...] | None] = {
    "driver": None,
    "engine": ("slime.engines.embedded", "engines/sglang/run_server.py"),
    "trainer": ("slime.runtime.worker_main",),
    "reward worker": ("rm_hub/workers/worker.py",),
    "agent program": ("program.py",),
    "rollout worker": ("--name rollout-worker",),
    "router": ("sglang_router.launch_router", "sglang::router"),  # the name that it gives itself
}


def main() -> None:
    plans, note, script, flags = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    for plan in plans:
        set_trap(plan, note)
    module = "slime.cli.train_async" if "async" in script else "slime.cli.train"
    raise SystemExit(importlib.import_module(module).main(flags) or 0)


def set_trap(plan: dict, note: Path) -> None:
    module, _, path = POINTS[plan["point"]].partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, lock, count = getattr(owner, name), threading.Lock(), [0]

    def reached() -> None:
        with lock:
            count[0] += 1
            now = count[0] == plan["nth"]
        if now:
            striker = threading.Thread(target=strike, args=(plan, note), daemon=True)
            striker.start()
            if plan["delay_s"] == 0:
                striker.join()  # the point itself

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)  # calls between processes go by name
        async def trapped(*args, **kwargs):
            reached()
            return await original(*args, **kwargs)
    else:

        @functools.wraps(original)
        def trapped(*args, **kwargs):
            reached()
            return original(*args, **kwargs)

    setattr(owner, name, trapped)


def strike(plan: dict, note: Path) -> None:
    time.sleep(plan["delay_s"])
    patterns = TARGETS[plan["target"]]
    pids = [os.getpid()] if patterns is None else descendants(os.getpid(), patterns)
    for pid in pids[-1:]:  # none: it is not there now, and nothing is struck
        with open(note, "a") as file, contextlib.suppress(ProcessLookupError):
            if patterns is not None:
                os.kill(pid, signal.SIGKILL)
            file.write(json.dumps({**plan, "pid": pid}) + "\n")
            file.flush()
            if patterns is None:
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int, patterns: tuple[str, ...]) -> list[int]:
    """Processes below this one whose command line holds one of the patterns."""
    parents, words = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue

    def below(child: int) -> bool:
        while child in parents and child != pid:
            child = parents[child]
        return child == pid

    def fits(child: int) -> bool:
        return child != pid and any(pattern in words.get(child, "") for pattern in patterns)

    # A supervisor holds the command line of what it supervises.
    return sorted(p for p in parents if fits(p) and "supervisor.py" not in words[p] and below(p))


if __name__ == "__main__":
    main()
