"""The rollout that was in flight when a checkpoint was written: a resumed run trains on that very one.

The asynchronous loop trains on samples of the weights before. A resumed run would make the batch anew with
the weights of now, one version later, and be another run from there on.
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
    """One line for each way in which this resumed run differs from the uninterrupted one.

    `ledgered`: the rollout behind the checkpoint comes from the ledger, so it is that of this very loop.
    """
    done = checkpoint.manifest.rollout_id
    if done + 1 == args.num_rollout:
        return  # nothing comes after it
    if not overlapped:
        if ledgered:
            return
        if batch is not None:
            _tell(
                "rollout %d was in flight in the asynchronous loop and is made anew here, with newer weights",
                done + 1,
            )
        return
    if batch is None:
        _tell(
            "the checkpoint holds no batch in flight (it is the last of its run, or of the synchronous "
            "loop, or of an older "
            "slime): rollout %d is made with weights one version newer than without the interruption",
            done + 1,
        )
    if (done + 1) % args.update_weights_interval:
        _tell(
            "the checkpoint lies between two weight pushes (--update-weights-interval %d) and engines get "
            "its weights now: rollouts until the next push are made with newer weights; save at a multiple "
            "of that interval to resume exactly",
            args.update_weights_interval,
        )
    if args.rollout_function_path.endswith(_FULLY_ASYNC) and not args.deterministic_mode:
        _tell("groups that were in flight in the pool are made anew, with newer weights")


def _tell(text: str, *values: object) -> None:
    logger.warning("resumed, but not bit for bit the same run: " + text, *values)
