"""The W&B functions of THUDM/slime, for plug-ins. Only the run's own tracker opens a W&B run.

`logging_utils.log` writes to the run's metrics, which that tracker reads. A plug-in that calls `wandb.log`
itself has to open its own run with `wandb.init`.
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
    """Return the id of the run at Weights & Biases: --wandb-run-id, or slime's own."""
    given: str | None = getattr(args, "wandb_run_id", None)
    record = read_run(Path(args.run_dir)) if given is None and getattr(args, "run_dir", None) else None
    return given or (record.id if record is not None else None)
