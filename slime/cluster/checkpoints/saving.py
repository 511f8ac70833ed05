"""Writes the checkpoints of a run; trainer ranks may finish writing one in the background."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.cluster.checkpoints.checkpoint import (
    ROLLOUT,
    StagedCheckpoint,
    discard_staged,
    stage_checkpoint,
    write_state,
)
from slime.cluster.checkpoints.published import CARD, Models
from slime.cluster.checkpoints.resume_point import write_in_flight
from slime.cluster.checkpoints.save_folder import naming_disk_errors
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import Ranks
from slime.runtime.base import Future, Handle
from slime.utils.files.checksums import FileRecord, record_files
from slime.utils.files.step_folders import Manifest, step_path

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints to `folder` (of --save) and models to `save_hf`; None: the run keeps none of these.

    `keep_last` None: all checkpoints stay.
    """

    def __init__(
        self,
        folder: Path | None,
        save_hf: str | None,
        keep_last: int | None,
        ranks: Ranks[TrainActor],
        rollout: Handle[RolloutManager],
        models: Models | None = None,
        on_commit: Callable[[int], object] = lambda rollout_id: None,
    ):
        self._folder, self._save_hf, self._keep_last = folder, save_hf, keep_last
        self._ranks, self._rollout, self._models, self._on_commit = ranks, rollout, models, on_commit
        self.staged: StagedCheckpoint | None = None  # written by the ranks, not yet complete
        self._needed_bytes = 0  # what the last one took

    def save(
        self,
        manifest: Manifest,
        cursor: dict[str, Any] | None,
        in_flight: Future[Generated] | None,
        *,
        wait: bool,
    ) -> float:
        """Save a checkpoint: the data cursor of the trained batch, and the next rollout if it is in flight.

        The trainer's part is written first, while that rollout is generated. If `wait` is False, ranks may
        still write when this returns. Returns the seconds it took, without the wait for generation.
        """
        started, rollout_id = time.monotonic(), manifest.rollout_id
        if self._folder is None:
            self._save_hf_beside(rollout_id)
            return time.monotonic() - started
        self.finish(wait=True)
        with self._naming_disk_errors(rollout_id):
            self.staged = staged = stage_checkpoint(
                self._folder,
                manifest,
                lambda path: self._ranks.call(TrainActor.save, path),
                self._needed_bytes,
            )
            write_state(cursor, staged.staging / ROLLOUT)
            waiting = time.monotonic()
            write_in_flight(staged.staging, rollout_id + 1, in_flight)
            started += time.monotonic() - waiting  # the loop would wait for that batch anyway
            if cursor is None:
                self._rollout.call_control(RolloutManager.save_data_source, rollout_id).result()
            self._save_hf_inside(staged)
        self.finish(wait=wait)
        self._save_hf_beside(rollout_id)
        return time.monotonic() - started

    def finish(self, *, wait: bool) -> None:
        """Completes the checkpoint that ranks write, if they are done; `wait`: when they are."""
        staged = self.staged
        if staged is None:
            return
        with self._naming_disk_errors(staged.rollout_id):
            written = self._ranks.call(TrainActor.finish_save, wait=wait)
            files: dict[str, FileRecord] = {}
            for of_rank in written:
                if of_rank is None:
                    return
                files |= of_rank
            inside = self._hf_inside(staged)
            if inside is not None and (staged.staging / inside / CARD).is_file():
                files |= record_files(staged.staging, [str(inside / CARD)], sync=True)
            self._rollout.call_control(RolloutManager.write_ledger).result()
            checkpoint = staged.complete(files, self._keep_last)
            self._rollout.call_control(RolloutManager.note_committed, staged.rollout_id)
        self.staged = None
        self._on_commit(staged.rollout_id)
        if self._models is not None and inside is not None:
            self._models.link(staged.final / inside)
            self._models.push(staged.final / inside, staged.rollout_id)
        self._needed_bytes = sum(record.num_bytes for record in (checkpoint.manifest.files or {}).values())

    def _hf_inside(self, staged: StagedCheckpoint) -> Path | None:
        """Return the Hugging Face folder inside the checkpoint's own folder; None: it lies elsewhere."""
        path, final = self._hf_path(staged.rollout_id), staged.final.resolve()
        return path.relative_to(final) if path is not None and path.is_relative_to(final) else None

    def _save_hf_inside(self, staged: StagedCheckpoint) -> None:
        """Write the Hugging Face folder that lies inside the checkpoint, as part of its transaction."""
        inside = self._hf_inside(staged)
        if inside is None:
            return
        self._ranks.call(TrainActor.save_hf, staged.staging.resolve() / inside)
        if self._models is not None:
            self._models.describe(staged.staging / inside, staged.rollout_id)

    def _save_hf_beside(self, rollout_id: int) -> None:
        """Write a Hugging Face folder outside of the checkpoint, which is complete by then and stays."""
        path = self._hf_path(rollout_id)
        if path is None:
            return
        if self._folder is not None and path.is_relative_to(step_path(self._folder, rollout_id).resolve()):
            return
        try:
            with naming_disk_errors("--save-hf", path.parent, rollout_id):
                self._ranks.call(TrainActor.save_hf, path)
            if self._models is not None:
                self._models.made(path, rollout_id)
        except Exception:
            self.finish(wait=True)
            raise

    def _hf_path(self, rollout_id: int) -> Path | None:
        return Path(self._save_hf.format(rollout_id=rollout_id)).resolve() if self._save_hf else None

    @contextlib.contextmanager
    def _naming_disk_errors(self, rollout_id: int) -> Iterator[None]:
        """Raise the disk's reason where a checkpoint cannot be written, and free its space."""
        assert self._folder is not None, "no checkpoint without --save"
        try:
            with naming_disk_errors("--save", self._folder, rollout_id):
                yield
        except Exception:
            discard_staged(self._folder)
            self.staged = None
            raise
