"""Stores the rollout that was in flight when a checkpoint was written: a resumed run trains on it.

The asynchronous loop trains on samples of the previous weights; generated again, the batch would come from
weights one version later.
"""

from __future__ import annotations

import logging
from pathlib import Path

from slime.arguments import Args
from slime.cluster.checkpoints.checkpoint import IN_FLIGHT, read_state, write_state
from slime.cluster.checkpoints.run_ledger import plain_of
from slime.cluster.rollout_manager import Generated
from slime.runtime.base import Future
from slime.utils.files.step_folders import StepFolder

logger = logging.getLogger(__name__)

_FULLY_ASYNC = "generate_rollout_fully_async"


def write_in_flight(folder: Path, rollout_id: int, future: Future[Generated] | None) -> None:
    """Wait for rollout `rollout_id` and put it into a checkpoint. `future` None: nothing is being made."""
    if future is None:
        return
    try:
        generated = future.result()
    except Exception as error:  # raised where the loop asks for the batch; what was trained before is saved
        logger.warning("rollout %d failed (%s): the checkpoint is written without it", rollout_id, error)
        return
    try:
        write_state({"rollout_id": rollout_id, **plain_of(generated)}, folder / IN_FLIGHT)
    except ValueError as error:
        logger.warning("%s A resumed run generates rollout %d again.", error, rollout_id)


def read_in_flight(checkpoint: StepFolder) -> Generated | None:
    """The batch of the rollout after the checkpoint's; None: it holds none."""
    path = checkpoint.path / IN_FLIGHT
    if not (path.is_file() or path.with_suffix(".pt").is_file()):
        return None
    data = read_state(path)
    if data.pop("rollout_id") != checkpoint.manifest.rollout_id + 1:
        raise ValueError(
            f"{path} is not of the rollout after that of its checkpoint: restore it, or remove that file."
        )
    return Generated(**data)


def report_differences(
    args: Args, checkpoint: StepFolder, batch: Generated | None, *, overlapped: bool, ledgered: bool = False
) -> None:
    """Log each way in which this resumed run differs from the uninterrupted one.

    `ledgered`: the rollout after the checkpoint comes from the ledger, so this loop made it.
    """
    following = checkpoint.manifest.rollout_id + 1
    if following == args.num_rollout:
        return  # nothing comes after it
    reasons = []
    if not overlapped and not ledgered and batch is not None:
        reasons += [f"the asynchronous loop was generating rollout {following}, which starts again"]
    if overlapped and batch is None:
        reasons += [f"the checkpoint holds no rollout in flight: rollout {following} starts again"]
    if overlapped and following % args.update_weights_interval:
        reasons += [
            "the checkpoint lies between two weight pushes; save at a multiple of "
            f"--update-weights-interval {args.update_weights_interval} to resume exactly"
        ]
    if overlapped and args.rollout_function_path.endswith(_FULLY_ASYNC) and not args.deterministic_mode:
        reasons += ["groups that were in flight in the pool start again"]
    for reason in reasons:
        logger.warning("resumed, but not bit for bit the same run (newer weights generate): %s.", reason)
