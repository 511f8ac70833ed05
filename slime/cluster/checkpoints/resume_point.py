"""Finds where a run starts: at its first rollout, or after a checkpoint and the rollouts in the ledger."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.cluster.checkpoints.checkpoint import resolve_load, rollout_state
from slime.cluster.checkpoints.in_flight import read_in_flight, report_differences
from slime.cluster.checkpoints.run_ledger import Resume, find_resume
from slime.cluster.rollout_manager import Generated
from slime.utils.files.checksums import FileRecord
from slime.utils.files.step_folders import StepFolder
from slime.utils.machine.run_identity import Run

logger = logging.getLogger(__name__)

# Names the files of a checkpoint folder that are not as they were written.
FindDamage = Callable[[Path, Mapping[str, FileRecord]], list[str]]


def verify_checkpoint(
    args: Args, checkpoint: StepFolder | None, find_damage: FindDamage
) -> StepFolder | None:
    """Check every file against its checksum; where one differs, log it and use the checkpoint before."""
    if checkpoint is None:
        return checkpoint
    if checkpoint.manifest.files is None:
        logger.warning("%s has no checksums (an older slime wrote it): it is not verified.", checkpoint.path)
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
    """Where a run starts or resumes. `restored`: rollouts that were complete before, by number."""

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
        state = rollout_state(checkpoint) if checkpoint is not None else None
    return ResumePoint(committed + 1, replace(resume, made={}), state, num_pushes, restored)
