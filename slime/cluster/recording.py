"""Passes samples, spans, advantages and replies to requests on to the run's record."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slime.arguments import Args
from slime.liveness import waits
from slime.observability.tracer import Span, forget_spans, spans_of_samples, spans_of_waits, write_spans
from slime.record import RecordError, RecordWriter, group_entries
from slime.record.actions import ASKED, REFUSED, ActionRow, forget_replied, read_actions, write_reply
from slime.record.additions import Advantage, PieceBook, write_advantages, write_histograms
from slime.record.place import copy_record, forget_local, prepare_record
from slime.record.samples import Entry
from slime.record.schema import RECORD_FILE, open_for_reading
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import Settled
from slime.utils.machine.run_identity import Run
from slime.utils.processing_utils import load_tokenizer


class Recording:
    """The record's writer for one run; `writer` None: --record-max-mib is 0, and nothing is recorded."""

    def __init__(self, run: Run, args: Args):
        self._reward_key = args.reward_key
        self._eval_reward_key = args.eval_reward_key or args.reward_key
        self._folder = run.run_dir
        self._replied: set[int] = set()  # rows of actions whose replies are written, or soon will be
        self._pieces: PieceBook | None = None  # None: tokens are recorded without their text
        if args.hf_checkpoint is not None:
            tokenizer = args.hf_checkpoint
            self._pieces = PieceBook(lambda ids: token_texts(load_tokenizer(tokenizer), ids))
        self.writer: RecordWriter | None = None
        if args.record_max_mib:
            self._file = prepare_record(run.run_dir, run.run_id, args.record_dir)
            self.writer = RecordWriter(
                self._file,
                run.run_id,
                args.record_max_mib << 20,
                start=run.num_starts,
                keeps_uncommitted=args.save is not None,
            )

    def rollout(
        self, rollout_id: int, output: RolloutFnTrainOutput, dropped: Sequence[Settled], version: str | None
    ) -> None:
        """Record the groups that are trained on, and the groups dropped while they were collected."""
        entries = group_entries(output.samples, "trained")
        for settled in dropped:
            entries += group_entries([settled.group], settled.outcome, settled.reason)
        self._add("train", rollout_id, entries, version, self._reward_key)

    def evaluation(self, rollout_id: int, output: RolloutFnEvalOutput, version: str | None) -> None:
        entries = [
            entry
            for dataset, result in output.data.items()
            for entry in group_entries(result.get("samples") or [], "evaluated", dataset=dataset)
        ]
        self._add("eval", rollout_id, entries, version, self._eval_reward_key)

    def _add(
        self, kind: str, rollout_id: int, entries: list[Entry], version: str | None, reward_key: str | None
    ) -> None:
        """Record groups, the text of tokens that are new, and when engines and rewards worked on samples."""
        if self.writer is None:
            return
        self.writer.add(kind, rollout_id, entries, version=version, reward_key=reward_key)
        samples = [sample for entry in entries for sample in entry.samples]
        waited = spans_of_waits(rollout_id)

        def write(connection: sqlite3.Connection) -> None:
            write_spans(connection, spans_of_samples(rollout_id, samples) + waited)
            if self._pieces is not None:
                with contextlib.suppress(Exception):  # no tokenizer of ours: the page shows ids
                    self._pieces.write(connection, samples)

        self._submit("spans and texts", write)

    def _submit(self, what: str, write: Callable[[sqlite3.Connection], object]) -> None:
        if self.writer is not None:
            self.writer.submit(what, write)

    # -- what the driver tells; a run without a record has none of it

    def begin(self, start_rollout_id: int) -> None:
        """Settle what an earlier start left open: steps that are repeated, and actions without a reply."""
        waits.drain_ended()  # of the start, which is no part of a step
        self._submit("the start", lambda c: forget_spans(c, start_rollout_id))
        self._refuse_open("the run had ended before it could reply")

    def now(self, doing: str | None, since: float, rollout_id: int) -> None:
        """Record what the driver is doing, for the dashboard of a live run."""
        text = json.dumps({"doing": doing, "since": since, "step": rollout_id})
        insert = "INSERT OR REPLACE INTO meta VALUES ('now', ?)"
        self._submit("what is done now", lambda c: c.execute(insert, (text,)))

    def step(
        self,
        rollout_id: int,
        spans: Sequence[Span],
        advantages: Sequence[Advantage],
        histograms: Sequence[dict[str, list[int]]],
    ) -> None:
        """Record the spans and advantages of a finished step, and histograms of ranks, which are added up."""
        self._submit("spans", lambda c: write_spans(c, spans))
        self._submit("advantages", lambda c: write_advantages(c, rollout_id, advantages))
        self._submit("histograms", lambda c: write_histograms(c, rollout_id, histograms))

    def actions(self, state: str | None = None) -> list[ActionRow]:
        """Return requested actions, oldest first; none where the record cannot be read just now.

        One whose reply is still being written is open in the file, and would be done a second time.
        """
        if self.writer is None:
            return []
        try:
            with contextlib.closing(open_for_reading(self._file)) as connection:
                rows = read_actions(self._folder, connection, state)
                if not self._is_elsewhere:
                    forget_replied(connection, self._folder)
        except (RecordError, sqlite3.Error, OSError):
            return []
        return [row for row in rows if row.state != ASKED or row.id not in self._replied]

    def reply(self, row: ActionRow, state: str, rollout_id: int, text: str) -> None:
        self._replied.add(row.id)
        done = replace(row, state=state, reply_time=time.time(), rollout_id=rollout_id, reply=text)
        self._submit("a reply", lambda c: write_reply(c, self._folder, done))

    def _refuse_open(self, why: str) -> None:
        for row in self.actions(ASKED):
            self.reply(row, REFUSED, -1, why)

    def flush(self) -> None:
        """Block until everything that was recorded so far is on disk."""
        if self.writer is not None:
            self.writer.flush()

    def copy(self) -> bool:
        """Copy a record that is written elsewhere to the run's folder; return whether that was done."""
        if not self._is_elsewhere or not copy_record(self._file, self._folder):
            return False
        with contextlib.closing(open_for_reading(self._folder / RECORD_FILE)) as connection:
            forget_replied(connection, self._folder)
        return True

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the record is on a local disk of this host, and others see only its copies."""
        return self.writer is not None and self._file.parent != self._folder

    def close(self) -> None:
        self.flush()  # a reply that is being written closes its request
        self._refuse_open("the run has ended")
        self.now(None, 0.0, -1)
        if self.writer is not None:
            self.writer.close()
        if self.copy():
            forget_local(self._file, self._folder)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, with the space that sentence-piece vocabularies write as a mark."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = []
    for number, name in zip(ids, names, strict=True):
        text = tokenizer.decode([number])
        space = isinstance(name, str) and name.startswith("\u2581") and not text.startswith(" ")
        texts.append(f" {text}" if space else text)
    return texts
