"""Finds where a run starts: at its first rollout, or after a checkpoint and the rollouts in the ledger.

A checkpoint holds the rollout that was in flight when it was written: the asynchronous loop trains on samples
of the previous weights; generated again, the batch would come from weights one version later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.cluster.checkpoints.checkpoint import IN_FLIGHT, ROLLOUT, read_state, resolve_load, write_state
from slime.cluster.checkpoints.run_ledger import Resume, encodable, find_resume
from slime.cluster.rollout_manager import Generated
from slime.runtime.base import Future
from slime.utils.files.checksums import FileRecord
from slime.utils.files.step_folders import StepFolder
from slime.utils.machine.run_identity import Run
from slime.utils.stored_arrays import references_of

logger = logging.getLogger(__name__)

_FULLY_ASYNC = "generate_rollout_fully_async"

# Names the files of a checkpoint folder that are not as they were written.
FindDamage = Callable[[Path, Mapping[str, FileRecord]], list[str]]


def verify_checkpoint(
    args: Args, checkpoint: StepFolder | None, find_damage: FindDamage
) -> StepFolder | None:
    """Check every file against its checksum; where one differs, log it and use the checkpoint before."""
    if checkpoint is None:
        return checkpoint
    if checkpoint.manifest.files is None:
        logger.warning(
            "Checkpoint %s has no checksums (an older slime wrote it) and is not verified.", checkpoint.path
        )
    started = time.monotonic()
    found = resolve_load(
        args.load,
        args.save,
        args.ckpt_step,
        damage_of=lambda step: find_damage(step.path, step.manifest.files or {}),
        latest=checkpoint.manifest.rollout_id,
    )
    assert found is not None, "a folder that held a checkpoint holds one, or an error was raised"
    logger.info("Verified the checkpoint %s in %.1f s.", found.path, time.monotonic() - started)
    return found


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which a run starts or resumes. `restored`: earlier complete rollouts, by number."""

    rollout_id: int
    resume: Resume
    rollout_state: dict[str, Any] | None = None
    num_pushes: int = 0
    restored: dict[int, Generated] = field(default_factory=dict)


def find_resume_point(args: Args, run: Run, checkpoint: StepFolder | None, overlapped: bool) -> ResumePoint:
    """Find the first rollout to train: the one after the checkpoint, which may be complete already."""
    if args.finetune or (checkpoint is None and args.start_rollout_id is not None):
        resume = find_resume(args, run, (args.start_rollout_id or 0) - 1, overlapped=overlapped)
        return ResumePoint(args.start_rollout_id or 0, replace(resume, last_made=resume.committed, made={}))
    committed, num_pushes, in_flight = -1, 0, None
    if checkpoint is not None:
        committed, num_pushes = checkpoint.manifest.rollout_id, checkpoint.manifest.num_pushes
        logger.info("Resuming after rollout %d from %s.", committed, checkpoint.path)
        in_flight = read_in_flight(checkpoint)
    resume = find_resume(args, run, committed, overlapped=overlapped)
    restored = {rollout_id: Generated(**value) for rollout_id, value in resume.made.items()}
    if not restored and in_flight is not None and overlapped:
        restored, resume = {committed + 1: in_flight}, replace(resume, last_made=committed + 1)
    if checkpoint is not None:
        found = restored.get(committed + 1, in_flight)
        report_differences(args, checkpoint, found, overlapped=overlapped, ledgered=bool(resume.made))
    if restored:  # the data source continues after them
        state = restored[max(restored)].cursor
    else:
        # None: the data source of that run keeps its state by itself.
        state = read_state(checkpoint.path / ROLLOUT) if checkpoint is not None else None
    arrays = {rollout_id: references_of(made.batch) for rollout_id, made in restored.items()}
    resume = replace(resume, made={}, arrays=arrays)
    return ResumePoint(committed + 1, resume, state, num_pushes, restored)


def write_in_flight(folder: Path, rollout_id: int, future: Future[Generated] | None) -> None:
    """Wait for rollout `rollout_id` and save it in a checkpoint. `future` None: no rollout is in flight."""
    if future is None:
        return
    try:
        generated = future.result()
    except Exception as error:  # raised where the loop asks for the batch; what was trained before is saved
        logger.warning("Rollout %d failed (%s): the checkpoint is written without it.", rollout_id, error)
        return
    try:
        write_state({"rollout_id": rollout_id, **encodable(generated)}, folder / IN_FLIGHT)
    except ValueError as error:
        logger.warning("%s A resumed run generates rollout %d again.", error, rollout_id)


def read_in_flight(checkpoint: StepFolder) -> Generated | None:
    """Return the batch of the rollout that was in flight; None: the checkpoint holds none."""
    path = checkpoint.path / IN_FLIGHT
    if not (path.is_file() or path.with_suffix(".pt").is_file()):
        return None
    data = read_state(path)
    if data.pop("rollout_id") != checkpoint.manifest.rollout_id + 1:
        raise ValueError(
            f"{path} does not belong to the rollout after its checkpoint: restore it, or remove that file."
        )
    made = Generated(**data)
    return made if all(array.is_there() for array in references_of(made.batch)) else None


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
        logger.warning(
            "The resumed run will differ from an uninterrupted one (newer weights generate): %s.", reason
        )
