"""Restores from the ledger the rollouts that were complete when a run was killed.

The run's record holds their batches, so that a lost step is repeated on the same batch, whichever loop and
order of groups had produced it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from dataclasses import dataclass, field, fields
from typing import Any

from slime.arguments import Args
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.cluster.recording import Recording
from slime.record import LedgerReader, RecordError, record_file
from slime.rollout.ledger import Ledger
from slime.utils.codec import with_rows
from slime.utils.machine.run_identity import Run
from slime.utils.stored_arrays import StoredArray, references_of
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

# What may differ between two starts of a run that still would have made the same samples.
_OF_NO_SAMPLE = """
    run_dir load ckpt_step auto_resume save save_interval save_hf keep_last_n async_save num_rollout num_epoch
    eval_interval skip_eval_before_train log_level quiet
    record_max_mib record_dir skip_preflight lr_decay_iters max_restarts
    peer_copies timeouts elastic rollout_workers
""".split()  # noqa: SIM905 - a list of words reads better as words


@dataclass(frozen=True, slots=True)
class Resume:
    """The point of resuming: after step `committed`, with rollouts to `last_made` (both -1: a new run)."""

    settings: str  # digest of what samples depend on
    committed: int = -1
    last_made: int = -1
    made: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rollout, from the ledger
    overlapped: bool = False  # a rollout is made while the one before it is trained
    arrays: dict[int, list[StoredArray]] = field(default_factory=dict)  # that restored batches need


def settings_digest(args: Args, *, overlapped: bool) -> str:
    """Return a digest that two starts share exactly if one may train on samples of the other."""
    values = {name: value for name, value in args.to_dict().items() if name not in _OF_NO_SAMPLE}
    text = json.dumps([overlapped, values], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def find_resume(args: Args, run: Run, committed: int, *, overlapped: bool) -> Resume:
    """Return what the run's ledger has after a step; nothing, if the user goes back on purpose."""
    settings = settings_digest(args, overlapped=overlapped)
    made: dict[int, dict[str, Any]] = {}
    if run.num_starts > 1 and args.ckpt_step is None and not args.finetune and args.record_max_mib:
        try:
            with LedgerReader(record_file(run.run_dir)) as reader:
                found = reader.rollouts_after(committed, settings).items()
            # Up to the first whose data source keeps its own state: that state is of the checkpoint.
            made = dict(itertools.takewhile(lambda pair: _can_resume(**pair[1]), found))
        except (RecordError, ValueError) as error:
            text = "No rollout can be restored from the ledger (%s); lost rollouts are generated again."
            logger.warning(text, error)
    if made:
        first, last = min(made), max(made)
        logger.info(
            "Rollouts %d to %d were complete before the resume and are restored from the ledger.", first, last
        )
    return Resume(settings, committed, max(made, default=committed), made, overlapped)


def _can_resume(batch: RolloutBatch | None, cursor: dict[str, Any] | None, **others: Any) -> bool:
    return cursor is not None and all(array.is_there() for array in references_of(batch))


def open_ledger(args: Args, run: Run, recording: Recording, resume: Resume) -> Ledger | None:
    """Open the run's ledger with the samples that an earlier start finished; None if it keeps no record."""
    if recording.writer is None:
        return None
    known, episodes = {}, {}
    if run.num_starts > 1 and args.ckpt_step is None and not args.finetune:
        try:
            with LedgerReader(record_file(run.run_dir)) as reader:
                known = reader.finished_entries(resume.settings)
                episodes = reader.unfinished_episodes(resume.settings)
        except RecordError as error:
            logger.warning(
                "No sample can be restored from the ledger (%s); unfinished groups are repeated.", error
            )
    pool = args.rollout_function_path == FULLY_ASYNC_ROLLOUT_FUNCTION
    ledger = Ledger(
        recording.writer,
        resume.settings,
        keeps=args.save is not None,
        any_version=pool and not args.deterministic_mode,
        known=known,
        episodes=episodes,
        folder=run.run_dir / "episodes",
    )
    ledger.resumed(resume.committed, resume.last_made)
    return ledger


def was_evaluated(run: Run, rollout_id: int) -> bool:
    """Return whether the evaluation after a step is complete; also True if there is no ledger."""
    try:
        with LedgerReader(record_file(run.run_dir)) as reader:
            return reader.is_evaluated(rollout_id)
    except RecordError:
        return True


def encodable(generated: Any) -> dict[str, Any]:
    """Return the fields of a rollout for the codec, in containers that nobody else changes."""
    value = {f.name: getattr(generated, f.name) for f in fields(generated)}
    if value["batch"] is not None:
        own = {k: list(v) if isinstance(v, list) else v for k, v in value["batch"].items()}
        value["batch"] = with_rows(own)
    value["metrics"] = dict(value["metrics"])
    return value
