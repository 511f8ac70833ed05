"""Weights & Biases as plug-ins of slime set it up. The run's own tracker is the only one that opens a run.

What a plug-in reports with `logging_utils.log` is in the run's metrics, which that tracker follows. A plug-in
that calls `wandb.log` itself has to open a run of its own with `wandb.init`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.observability.logging_utils import init_tracking
from slime.utils.files.run_file import read_run


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
    """The id that the run has at Weights & Biases: --wandb-run-id, or the run's own id."""
    given: str | None = getattr(args, "wandb_run_id", None)
    record = read_run(Path(args.run_dir)) if given is None and getattr(args, "run_dir", None) else None
    return given or (record.id if record is not None else None)
