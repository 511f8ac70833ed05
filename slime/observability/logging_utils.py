"""Logging of this process, and one process-wide tracker for plug-ins that report their own metrics."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.observability.plugin_metrics import RolloutStep
from slime.observability.tracking import Tracker
from slime.utils.files.folder_lock import is_locked
from slime.utils.files.run_file import read_run

FORMAT = "[%(asctime)s{prefix}] %(filename)s:%(lineno)d - %(levelname)s: %(message)s"

_tracker: Tracker | None = None


def configure_logger(prefix: str = "", level: str | None = None) -> None:
    """Write log lines of this process to stderr, with time, prefix (rank, role) and source line.

    `level`: --log-level, which decides what the terminal shows; only `debug` adds lines to the log.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name("slime")
    handler.setFormatter(logging.Formatter(FORMAT.format(prefix=prefix), datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == "slime"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    # They log every HTTP request at INFO.
    for noisy in ("httpx", "aiohttp.access", "asyncio", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def init_tracking(args: Any, primary: bool = True, **kwargs: Any) -> Tracker:
    """Open this process's tracker in `args.run_dir`, or return the open one.

    The trackers of an active run belong to its driver, and read what is written here, too.
    """
    global _tracker
    if _tracker is None:
        _tracker = Tracker(args, args.run_dir, feeds=not is_locked(Path(args.run_dir), "--run-dir"))
    return _tracker


def log(args: Any, metrics: Mapping[str, Any], step_key: str, step: int | None = None) -> None:
    """Record metrics at `step`, which defaults to the metrics' own value of `step_key`."""
    if _tracker is None and not getattr(args, "run_dir", None):
        return  # outside of a run nothing is tracked
    place = metrics.get(step_key)
    if isinstance(place, RolloutStep):  # trackers count rollouts and convert the axis themselves
        metrics = {**metrics, step_key: place.rollout_id}
    init_tracking(args).log(metrics, step_key, step)


class _TensorboardAdapter:
    """Compatibility with THUDM/slime plug-ins: `log` reaches every tracker of the run."""

    def __init__(self, args: Any):
        self._args = args

    def log(self, data: Mapping[str, Any], step: int) -> None:
        log(self._args, data, "step", step)

    def finish(self) -> None:
        finish_tracking()


def finish_tracking(args: object = None) -> None:
    """Flush and close this process's tracker, if there is one."""
    global _tracker
    if _tracker is not None:
        tracker, _tracker = _tracker, None
        tracker.finish()


# -- the W&B functions of THUDM/slime. Only the run's own tracker opens a W&B run, and reads what is logged;
# a plug-in that calls `wandb.log` itself has to open its own run with `wandb.init`.


def init_wandb_primary(args: Any, **kwargs: Any) -> str | None:
    """Open this process's tracker, and return the id of the run at Weights & Biases (None: it is off)."""
    del kwargs
    if not getattr(args, "use_wandb", False):
        return None
    init_tracking(args)
    return wandb_run_id(args)


def init_wandb_secondary(args: Any, wandb_run_id: str | None = None, **kwargs: Any) -> str | None:
    """Let this process report to the run that the driver tracks; return the id of that run."""
    del wandb_run_id, kwargs
    return init_wandb_primary(args)


def reinit_wandb_primary_with_open_metrics(args: Any, router_addr: str | None = None) -> None:
    """Do nothing: metrics of engines are in the run's own metrics, which the tracker follows."""
    del args, router_addr


def wandb_run_id(args: Any) -> str | None:
    """Return the id of the run at Weights & Biases: --wandb-run-id, or the id of slime."""
    given: str | None = getattr(args, "wandb_run_id", None)
    record = read_run(Path(args.run_dir)) if given is None and getattr(args, "run_dir", None) else None
    return given or (record.id if record is not None else None)
