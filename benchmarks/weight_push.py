"""How long does a colocated engine stand still while it gets new weights?

The parts of a run, in their own processes: one trainer rank (FSDP backend) and one engine on the same device.
Each push goes the way of a training step: the engine releases its memory, the trainer moves in, the engine's
weights come back and are filled, the trainer leaves, the KV cache comes back. Per bucket size, medians over
the pushes of

- pause to continue: the engine generates nothing. Goal for 4B in bf16 on one GPU: 0.5 s.
- copy: what is kept for engines that restart; the engine already goes on.
- check: the engine's own checksums after the first push, against a load of the same weights from files.
- release, restore: memory of the engine, and the trainer's way in and out.

After each size the engine's checksums must be those of the push that was compared with the files.

    python benchmarks/weight_push.py --shape tiny                     # embedded engine, shared memory
    python benchmarks/weight_push.py --shape tiny --engine sglang     # SGLang on a CPU, request bodies
    python benchmarks/weight_push.py --shape 4b --engine sglang --sglang-python PATH    # CUDA IPC
"""

import argparse
import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_model

from slime.arguments import Args, parse_args
from slime.cli.main import user_errors
from slime.cluster.checkpoints.run_ledger import find_resume
from slime.cluster.residency import GENERATE, SYNC, TRAIN, Phase, Residency
from slime.cluster.rollout_manager import RolloutProcess
from slime.cluster.run_opening import open_run
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import RankProcesses, Ranks
from slime.cluster.weight_push import WeightPush
from slime.runtime import create_runtime
from slime.runtime.base import Handle, WorkerSpec
from slime.runtime.placement import plan_placement
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.accelerator import device_count
from slime.weight_sync.base import Site
from slime.weight_sync.transports import choose_transport
from slime.wire.control import EngineControl

GOAL_S = 0.5
MIB = 1 << 20
PARTS = ("pause to continue", "copy", "check", "release", "into sync", "restore")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--model-path", type=Path, help="model folder (default: random weights of --shape)")
    parser.add_argument(
        "--bucket-mib", type=int, nargs="+", default=[512, 1024, 2048], help="bucket sizes to try"
    )
    parser.add_argument(
        "--pushes", type=int, default=4, help="of each size; the first is left out of the medians"
    )
    parser.add_argument("--run-dir", type=Path, help="where logs go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/weight_push.json"))
    return parser.parse_known_args()


def read_flags(
    options: argparse.Namespace, extra: list[str], folder: Path, model: Path, bucket_mib: int
) -> Args:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"input": "1", "label": "1"}) + "\n")
    flags = {
        "--hf-checkpoint": model,
        "--run-dir": options.run_dir or folder / "run",
        "--prompt-data": prompts,
        "--label-key": "label",
        "--rm-type": "f1",
        "--rollout-batch-size": 1,
        "--n-samples-per-prompt": 2,
        "--num-rollout": 1,
        "--rollout-max-response-len": 16,
        "--rollout-engine": options.engine,
        "--update-weight-buffer-size": bucket_mib * MIB,
        "--actor-num-gpus-per-node": 1,
    }
    words = [str(token) for item in flags.items() for token in item]
    with user_errors():
        return parse_args([*words, "--colocate", *extra])


class _CurrentRanks(Ranks[TrainActor]):
    """The ranks of the trainer that is being measured; none between two of them."""

    current: list[Handle[TrainActor]] = []  # noqa: RUF012 - replaced, never changed

    @property
    def handles(self) -> list[Handle[TrainActor]]:
        return self.current


class Stand:
    """One engine that lives through all bucket sizes, and a trainer for each."""

    def __init__(self, args: Args):
        self._run = open_run(args)
        self.shm_prefix = self._run.shm_prefix
        self._placement = plan_placement(args, device_count())
        self._runtime = create_runtime(args, self._run.run_dir, self._run.shm_prefix)
        spec = WorkerSpec("rollout", near_driver=True)
        self._rollout = self._runtime.spawn(
            spec, RolloutProcess, args, self._run, self._placement, self._runtime
        )
        self._rollout.call(RolloutProcess.launch).result()
        resume = find_resume(args, self._run, -1, overlapped=False)
        facts = self._rollout.call(RolloutProcess.start, 0, None, resume).result()
        site = Site(device_count() > 0, True)
        self.transport = choose_transport(args.update_weight_transport, facts.transports, site)
        self.engine = EngineControl(facts.engine_urls[0], deadline_s=600.0)
        self._engines = self._rollout.part(RolloutProcess.weights)
        # One trainer after another, each with another bucket size, or none.
        self._ranks = _CurrentRanks([])
        self._num_pushes = 0
        self._residency = Residency(args, self._engines, self._ranks)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._rollout.call_control(RolloutProcess.close).result(60.0)
        self._runtime.close()
        shm.unlink_prefix(self._run.shm_prefix)

    def checksums(self) -> tuple[dict[str, str], float]:
        """The engine's own, and the seconds they took."""
        started = time.perf_counter()
        return run(self.engine.checksums()), time.perf_counter() - started

    def measure(self, args: Args, num_pushes: int) -> list[dict[str, float]]:
        """Pushes with the bucket size of `args`: seconds of each part."""
        self._residency.make_room()
        processes = RankProcesses(args, self._run, self._runtime, self._placement.trainer)
        try:
            ranks = processes.load(None).ranks
            self._ranks.current = ranks.handles
            push = WeightPush(
                ranks,
                self._engines,
                self._residency,
                self._run.run_id,
                "bfloat16" if device_count() else None,
                self._num_pushes,
                transport=self.transport,
                engine_urls=(),
            )
            push.open_senders()
            return [self._push(push) for _ in range(num_pushes)]
        finally:
            self._num_pushes += num_pushes
            self._ranks.current = []
            processes.actors.call(TrainActor.close)
            for handle in processes.actors.handles:
                handle.kill()  # its device memory goes with it

    def _push(self, push: WeightPush) -> dict[str, float]:
        self._residency.enter(GENERATE)
        parts = {"release": self._enter(TRAIN), "into sync": self._enter(SYNC)}
        metrics = push.push()
        paused = metrics.get("perf/update_weights_pause_time", metrics["perf/update_weights_engine_time"])
        check = metrics["perf/update_weights_check_time"]
        parts |= {"pause to continue": paused, "check": check, "bytes": metrics["perf/update_weights_bytes"]}
        parts["copy"] = metrics["perf/update_weights_time"] - paused - check
        if metrics["perf/engines_evicted"] or metrics.get("perf/engines_missed"):
            raise RuntimeError(f"the engine did not take the weights: {metrics}")
        print(
            f"  push: pause to continue {paused:.3f} s, copy {parts['copy']:.3f} s, check {check:.3f} s",
            flush=True,
        )
        return {**parts, "restore": self._enter(GENERATE)}

    def _enter(self, phase: Phase) -> float:
        started = time.perf_counter()
        self._residency.enter(phase)
        return time.perf_counter() - started


def measure_sizes(options: argparse.Namespace, extra: list[str], folder: Path, model: Path) -> dict[str, Any]:
    all_args = [read_flags(options, extra, folder, model, size) for size in options.bucket_mib]
    stand = Stand(all_args[0])
    rows, reference = [], None
    try:
        for size, args in zip(options.bucket_mib, all_args, strict=True):
            pushes = stand.measure(args, options.pushes)
            sums, checksum_s = stand.checksums()
            reference = reference or sums
            if sums != reference:
                raise RuntimeError(f"with buckets of {size} MiB the engine holds other weights than before")
            later = pushes[1:] or pushes
            medians = {
                part: statistics.median(push[part] for push in later) for part in PARTS if part != "check"
            }
            rows.append(
                {
                    "bucket_mib": size,
                    **medians,
                    "first": pushes[0],
                    "checksum_s": checksum_s,
                    "pushes": pushes,
                }
            )
            print_row(rows[-1])
    finally:
        stand.close()
    return {"transport": stand.transport, "rows": rows}


def print_row(row: dict[str, Any]) -> None:
    gib = row["first"]["bytes"] / 2**30
    times = ", ".join(f"{part} {row[part]:.3f}" for part in PARTS if part in row)
    print(f"buckets of {row['bucket_mib']} MiB, {gib:.2f} GiB in all, seconds: {times}; first push: pause "
          f"to continue {row['first']['pause to continue']:.3f}, check {row['first']['check']:.3f}; "
          f"engine's checksums again {row['checksum_s']:.3f}", flush=True)  # fmt: skip


def main() -> int:
    options, extra = parse()
    logging.getLogger("slime").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = "cuda" if device_count() else "cpu"
        model = options.model_path or write_model(options.shape, folder / "model", device=device)
        result = measure_sizes(options, extra, folder, model)
    best = min(row["pause to continue"] for row in result["rows"])
    print(
        f"{options.shape} by {result['transport']}: best pause to continue {best:.3f} s; goal for 4b: "
        f"{GOAL_S} s"
    )
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"settings": settings, "flags": extra, "goal_s": GOAL_S, **result}, indent=2) + "\n"
    )
    return 0 if best <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
