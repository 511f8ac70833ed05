"""Where metrics go: always one JSON object per line in the run folder, and TensorBoard or W&B when asked.

A line holds every metric of one report, its step axis and the wall time:
    {"time": 1754820000.1, "run": "3f9c01aa", "start": 1, "step_key": "rollout/step", "step": 3,
     "rollout/step": 3, "rollout/raw_reward": 0.5}
`run` is the id of the run that the folder belongs to (run.json), `start` counts its starts. A resumed run
appends; where a step occurs twice, the later line is the one that counts.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slime.utils.errors import RunStopped
from slime.utils.run_file import METRICS_FILE, read_run


class TrackerArgs(Protocol):
    """The flags that decide where metrics go; any `args` has them."""

    use_tensorboard: bool
    tb_project_name: str | None
    tb_experiment_name: str | None
    use_wandb: bool
    wandb_mode: str | None
    wandb_dir: str | None
    wandb_key: str | None
    wandb_host: str | None
    wandb_team: str | None
    wandb_group: str | None
    wandb_project: str | None
    wandb_run_id: str | None
    wandb_random_suffix: bool


class Tracker:
    """Takes metrics from any thread; each report is on disk when `log` returns."""

    def __init__(self, args: TrackerArgs, run_dir: str | Path):
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        # Sinks that may refuse come first: a refusal leaves no file behind.
        self._sinks: list[_TensorBoard | _WandB] = []
        if args.use_tensorboard:
            self._sinks.append(_TensorBoard(args, Path(run_dir)))
        if args.use_wandb:
            self._sinks.append(_WandB(args, Path(run_dir)))
        record = read_run(self.path.parent)
        self._origin = {"run": record.id, "start": record.num_starts} if record is not None else {}
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        _cut_torn_line(self._fd)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int | None = None) -> None:
        """Record metrics at a step of the axis `step_key`; without `step` they hold it under that key."""
        if step is None:
            if step_key not in metrics:
                raise ValueError(f"no step given and the metrics have no {step_key!r}")
            step = int(metrics[step_key])
        values = {key: plain_value(key, value) for key, value in metrics.items()}
        values[step_key] = step
        line = {"time": time.time(), **self._origin, "step_key": step_key, "step": step, **values}
        with self._lock:
            if self._fd is None:
                raise ValueError("this tracker is finished")
            # One write per line: lines of several processes never mix, and a crash cannot split one.
            self._write(self._fd, (json.dumps(_finite(line), allow_nan=False) + "\n").encode())
            for sink in self._sinks:
                sink.log(values, step_key, step)

    def _write(self, fd: int, line: bytes) -> None:
        try:
            written = os.write(fd, line)
        except OSError as error:
            raise RunStopped(
                f"--run-dir {self.path.parent}: metrics cannot be written: {error.strerror}"
            ) from error
        if written < len(line):
            raise RunStopped(f"--run-dir {self.path.parent}: metrics cannot be written: the disk is full")

    def finish(self) -> None:
        """Flush and close everything; calling it again does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                for sink in self._sinks:
                    sink.finish()

    close = finish

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a metrics file (or of the one in a run folder),
    in order; not one that is being written.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def plain_value(key: str, value: Any) -> Any:
    """A JSON value: numbers out of 0-d tensors and arrays, everything else only if JSON knows it."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {key!r} is a {type(value).__name__} of several elements, not a number"
            ) from error
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_value(f"{key}/{k}", v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(key, item) for item in value]
    raise ValueError(f"metric {key!r} is a {type(value).__name__}: log numbers or text")


def _finite(value: Any) -> Any:
    """JSON has no NaN; as text ("nan", "inf") it stays visible and `float()` reads it back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _cut_torn_line(fd: int) -> None:
    """Remove a last line without newline: what a machine that lost power left behind."""
    size = os.fstat(fd).st_size
    keep = size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(fd, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        os.ftruncate(fd, keep)


class _TensorBoard:
    def __init__(self, args: TrackerArgs, run_dir: Path):
        try:
            # Here, not above: an optional package, and slow to import.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--use-tensorboard needs the tensorboard package: pip install 'slime[tensorboard]'"
            ) from error
        parts = [name for name in (args.tb_project_name, args.tb_experiment_name) if name]
        self._writer = SummaryWriter(log_dir=str(run_dir.joinpath("tensorboard", *parts)))

    def log(self, values: dict[str, Any], step_key: str, step: int) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, args: TrackerArgs, run_dir: Path):
        try:
            import wandb  # here, not above: an optional package, and slow to import
        except ImportError as error:
            raise ValueError("--use-wandb needs the wandb package: pip install 'slime[wandb]'") from error
        if args.wandb_key:
            wandb.login(key=args.wandb_key, host=args.wandb_host)
        name = args.wandb_group
        if name and args.wandb_random_suffix:
            name = f"{name}-{wandb.util.generate_id()}"
        self._run = wandb.init(
            project=args.wandb_project,
            entity=args.wandb_team,
            group=args.wandb_group,
            name=name,
            id=args.wandb_run_id,
            resume="allow" if args.wandb_run_id else None,
            mode=args.wandb_mode,
            dir=args.wandb_dir or str(run_dir),
            config={key: value for key, value in _plain_settings(args).items() if key != "wandb_key"},
        )
        for axis in ("train", "rollout", "eval", "perf", "passrate", "multi_turn"):
            step_key = "rollout/step" if axis in ("perf", "passrate", "multi_turn") else f"{axis}/step"
            self._run.define_metric(f"{axis}/*", step_metric=step_key)

    def log(self, values: dict[str, Any], step_key: str, step: int) -> None:
        self._run.log(values)

    def finish(self) -> None:
        self._run.finish()


def _plain_settings(args: TrackerArgs) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in vars(args).items()}
