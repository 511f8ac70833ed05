"""Proves from the ledger that no sample was lost or trained twice.

Only the history that the run continued counts. Events after the point from which a later start resumed were
lost with their process, and repeated.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slime.record.ledger_rows import LedgerReader, LedgerRow
from slime.record.reader import Record, Select
from slime.record.schema import RecordError, unusable
from slime.utils.types import version_number

_MOST = 1_000_000_000
_MANY = 10_000  # limit of missing groups or steps in one report


@dataclass
class Audit:
    """The result of an audit. `violations` is empty if nothing was lost and nothing was trained twice."""

    num_events: int = 0
    num_starts: int = 0
    steps: list[int] = field(default_factory=list)  # consumed, in the history that counts
    committed: int = -1  # the last step that a checkpoint covers
    groups: Counter[str] = field(default_factory=Counter)
    num_samples: int = 0  # trained
    redone: int = 0  # steps that were lost and repeated
    recalled: int = 0  # samples that were restored from the ledger instead of generated again
    calls: int = 0  # of tools and environments, in episodes
    repeated_calls: int = 0  # that may be repeated, and were after a crash
    continued: int = 0  # episodes that resumed after a crash, in the turn in which it happened
    restarted: int = 0  # episodes that started again
    unrecorded: list[int] = field(default_factory=list)  # steps whose samples could not be written
    unnumbered: list[int] = field(default_factory=list)  # steps whose samples belong to no group
    digest: str = ""  # counts of all that was trained, dropped and evaluated
    violations: list[str] = field(default_factory=list)


def audit(path: Path, *, finished: bool, run_id: str | None = None, saved: Iterable[int] = ()) -> Audit:
    """Audit the record of a run. RecordError: it cannot be read.

    `finished`: the run has ended, so no group may still be in flight. `run_id`: the run that owns the folder;
    None: not known. `saved`: the steps after which checkpoints of that run are on the disk.
    """
    try:
        return _audit(path, finished, run_id, saved)
    except RecordError:
        raise
    except (ValueError, TypeError) as error:  # a row that slime did not write like this
        raise unusable(path, "read", error) from error


def _audit(path: Path, finished: bool, run_id: str | None, saved: Iterable[int]) -> Audit:
    with LedgerReader(path) as reader:
        owner = reader.meta("run")
        if run_id is not None and owner != run_id:
            raise RecordError(f"{path} is the record of run {owner}, but its folder belongs to run {run_id}.")
        reader.check_structure()
        rows, missed = reader.events(), reader.meta("missed_events")
        noted = set(json.loads(reader.meta("missed_steps") or "[]"))
    found = Audit(num_events=len(rows), num_starts=len({row.start for row in rows}))
    if missed:
        found.violations.append(
            f"{missed} events could not be written (a full disk?): the audit can prove nothing"
        )
    trained = {row.rollout for row in rows if row.event == "consumed"}
    last_load = max((row.rollout for row in rows if row.event == "resumed"), default=-1)
    unknown = sorted(step for step in saved if step not in trained and step > last_load)
    if unknown:  # a checkpoint waits until everything before it is written
        found.violations.append(
            f"there are checkpoints after steps {unknown[:5]}, but the ledger has no event of their "
            "training: its last events are lost (is record.db-wal complete, and in the same folder?)"
        )
    if not rows:  # a start that was killed before its first event has nothing to lose
        if finished:
            found.violations.append("the ledger is empty, although the run has finished")
        return found
    found.recalled = sum(row.event == "recalled" for row in rows)
    kept = _walk_groups(_history_of_groups(rows, found), found, finished)
    _walk_steps(rows, kept, found)
    _walk_calls(rows, kept, found)
    with Record(path) as record:
        _compare_with_samples(record, kept, noted, found)
        _find_unknown_samples(record, {row.rollout for row in rows if row.event == "kept"}, found)
        for kind, number in record.changed():
            found.violations.append(f"the samples of {kind} {number} differ from what was written")
        found.digest = digest(record, found.steps, rows)
    return found


def _history_of_groups(rows: list[LedgerRow], found: Audit) -> list[LedgerRow]:
    """Return the events of groups and samples, without the ones that a later start did not resume from."""
    history: list[LedgerRow] = []
    ends: dict[int, int] = {}  # rollout -> length of the history when it was complete
    for row in rows:
        if row.event == "resumed":
            last_made = int(row.value or -1)
            if last_made >= 0 and history and last_made not in ends:
                found.violations.append(
                    f"start {row.start} resumed after rollout {last_made}, which the ledger does not have"
                )
            del history[ends.get(last_made, 0) :]
            ends = {rollout: end for rollout, end in ends.items() if rollout <= last_made}
            history.append(row)
        elif row.event in ("issued", "generated", "recalled", "kept", "dropped", "returned", "cut"):
            history.append(row)
            if row.event == "cut":
                ends[row.rollout] = len(history)
    return history


def _walk_groups(history: list[LedgerRow], found: Audit, finished: bool) -> dict[int, list[LedgerRow]]:
    """Follow each group through its states, and return the groups of each rollout's batch."""
    state: dict[int, str] = {}
    kept: dict[int, list[LedgerRow]] = {}
    generated: set[int] = set()
    new: set[int] = set()
    resumed_in_middle = False
    for row in history:
        group = row.group_index
        if row.event == "resumed":  # groups in flight are in the buffer of the saved cursor
            state = {g: "buffer" if s == "in flight" else s for g, s in state.items()}
            resumed_in_middle |= row.rollout >= 0 and not kept
        elif group is None:
            continue
        elif row.event in ("generated", "recalled"):
            generated.add(group)
        elif row.event == "issued":
            if row.value == "new" and group in new:
                found.violations.append(f"group {group} was handed out twice as a new one")
            if state.get(group) == "in flight":
                found.violations.append(f"group {group} was handed out while it was in flight")
            new |= {group} if row.value == "new" else set()
            state[group] = "in flight"
        elif row.event == "returned":
            state[group] = "buffer"
        elif row.event in ("kept", "dropped"):
            where = state.get(group, "unknown")
            if where != "in flight" and not resumed_in_middle:
                found.violations.append(
                    f"group {group} was {row.event} in rollout {row.rollout}, and was {where} before"
                )
            state[group] = row.event
            if row.event == "kept":
                kept.setdefault(row.rollout, []).append(row)
    gaps = _missing(new, min(new), max(new)) if new else []
    if gaps:
        found.violations.append(f"groups {gaps[:5]} were never handed out, though later ones were")
    in_flight = sorted(group for group, where in state.items() if where == "in flight")
    if finished and in_flight:
        found.violations.append(f"groups {in_flight[:5]} are lost: the run ended with them in flight")
    found.groups = Counter(state.values())
    return kept


def _missing(known: set[int], first: int, last: int) -> list[int]:
    """Return the lowest numbers from `first` to `last` that are not known (at most `_MANY`)."""
    return list(itertools.islice((n for n in range(first, last + 1) if n not in known), _MANY))


def _walk_steps(rows: list[LedgerRow], kept: dict[int, list[LedgerRow]], found: Audit) -> None:
    """Check that each step consumes the batch of its rollout once; only lost steps are repeated."""
    consumed: set[int] = set()
    base = 0
    for row in rows:
        if row.event == "resumed":
            found.redone += sum(step > row.rollout for step in consumed)
            consumed = {step for step in consumed if step <= row.rollout}
            if not consumed:
                base = row.rollout + 1
            lost = _missing(consumed, base, row.rollout)
            if lost:  # reported once: each later checkpoint would miss them as well
                found.violations.append(
                    f"start {row.start} resumed from the checkpoint after step {row.rollout}, but the ledger "
                    f"has no event of the training of steps {lost[:5]}: was it not written (a full disk)?"
                )
                consumed |= set(lost)
        elif row.event == "consumed":
            if row.rollout in consumed:
                found.violations.append(f"step {row.rollout} was trained twice")
            consumed.add(row.rollout)
        elif row.event == "committed":
            found.committed = row.rollout
            missing = _missing(consumed, base, row.rollout)
            if missing:
                found.violations.append(f"the checkpoint after step {row.rollout} misses step {missing[0]}")
    found.steps = sorted(consumed)
    trained: dict[int, int] = {}  # sample -> step
    returned = {row.group_index for row in rows if row.event == "returned"}
    for step in found.steps:
        for row in kept.get(step, []):
            for sample in json.loads(row.value or "[]"):
                if sample in trained and row.group_index not in returned:
                    found.violations.append(
                        f"sample {sample} was trained by steps {trained[sample]} and {step}"
                    )
                trained[sample] = step
    found.num_samples = len(trained)


def _walk_calls(rows: list[LedgerRow], kept: dict[int, list[LedgerRow]], found: Audit) -> None:
    """Check over all starts that each call was made once, unless it may be repeated, and has returned."""
    open_calls: dict[str, LedgerRow] = {}
    called: set[str] = set()
    episodes: dict[tuple[int | None, int | None], list[str]] = {}
    for row in rows:
        if row.event not in ("called", "replied", "continued", "restarted"):
            continue
        about = json.loads(row.value or "{}")
        call = str(about["id"])
        names = episodes.setdefault((row.sample_index, row.attempt), [])
        if (name := call.partition(".")[0]) not in names:
            names.append(name)
        found.continued += row.event == "continued"
        if row.event == "replied":
            open_calls.pop(call, None)
        elif row.event == "called":
            if call in called and not about["repeatable"]:
                found.violations.append(f"call {call} of sample {row.sample_index} was made twice")
            found.repeated_calls += call in called
            called.add(call)
            open_calls[call] = row
    found.calls = len(called)
    found.restarted = sum(len(names) - 1 for names in episodes.values())
    last = {names[-1] for names in episodes.values()}
    trained = {sample for rows in kept.values() for row in rows for sample in json.loads(row.value or "[]")}
    for call, row in open_calls.items():
        if call.partition(".")[0] in last and row.sample_index in trained:
            found.violations.append(f"sample {row.sample_index} was trained without a result of call {call}")


def _compare_with_samples(
    record: Record, kept: dict[int, list[LedgerRow]], noted: set[int], found: Audit
) -> None:
    """Check that the record has exactly the samples of each step that the ledger says were kept.

    `noted`: steps whose samples the run could not write, as the record says.
    """
    rows = [row for row in record.rollouts() if row.kind == "train"]
    absent = set(found.steps) - {row.rollout_id for row in rows}
    found.unrecorded = sorted(absent & noted)
    for step in sorted(absent - noted):
        found.violations.append(
            f"step {step} was trained, but its samples are not in the record, nor a note that they could not "
            "be written"
        )
    pruned = {row.rollout_id for row in rows if row.pruned}
    for step in found.steps:
        select = Select(kind="train", rollout_id=step, outcome="trained", limit=_MOST)
        samples = record.samples(select)
        if step not in kept:
            if samples and all(sample.group_index is None for sample in samples):
                found.unnumbered.append(step)  # from a user's data source, which does not number groups
                continue
            found.violations.append(f"step {step} was trained, and no group was kept for it")
        if step in pruned or step in absent:
            continue
        there = {a.sample_index for a in samples if a.sample_index is not None}
        expected = {sample for row in kept.get(step, []) for sample in json.loads(row.value or "[]")}
        if there != expected:
            odd = sorted(there ^ expected)[:5]
            found.violations.append(
                f"step {step}: samples {odd} are in its batch or in the ledger, not in both"
            )


def _find_unknown_samples(record: Record, kept: set[int], found: Audit) -> None:
    """Find rollouts with samples but no events. `kept`: rollouts of which some start kept a group."""
    for row in record.rollouts():
        if row.kind == "train" and not row.pruned and row.rollout_id not in kept:
            select = Select(kind="train", rollout_id=row.rollout_id, outcome="trained", limit=_MOST)
            numbers = [sample.group_index for sample in record.samples(select)]
            if any(number is not None and number >= 0 for number in numbers):
                found.violations.append(
                    f"the samples of rollout {row.rollout_id} are in the record, but the ledger has no "
                    "event of it: events are lost"
                )


def digest(record: Record, steps: list[int], rows: list[LedgerRow]) -> str:
    """Return a digest that two runs share exactly if they trained on the same tokens in the same steps."""
    made = hashlib.blake2b(digest_size=16)
    for step in steps:
        for sample in record.samples(Select(kind="train", rollout_id=step, limit=_MOST)):
            tokens = record.tokens(sample.row)
            versions = [(version_number(v), start, end) for v, start, end in tokens.versions]
            about = (step, sample.group_index, sample.sample_index, sample.outcome, sample.reason)
            numbers = (tokens.ids, tokens.log_probs, tokens.loss_mask, versions, sample.reward)
            made.update(repr((about, numbers)).encode())
    evaluated = sorted({row.rollout for row in rows if row.event == "evaluated"})
    made.update(repr(evaluated).encode())
    return made.hexdigest()
