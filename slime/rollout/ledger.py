"""Reports every event of groups and samples to the record of the run, and restores finished samples.

After a crash `recall` returns samples as they were generated and scored, so that only unfinished ones are
generated again. The data source reports through its journal, and the rollout through `recall` and `finished`.
The rollout manager reports whatever else a user's rollout function returns.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.record.ledger_rows import (
    Event,
    Finished,
    FinishedEntry,
    ForgetEntries,
    Note,
    encode_or_skip,
    forget_rollouts,
    keep_rollout,
)
from slime.record.texts import json_text
from slime.record.writer import RecordWriter
from slime.rollout.collection.versions import newest_version
from slime.rollout.journal import CountingJournal, Outcome
from slime.rollout.prompt_groups import (
    FINISHED,
    Entry,
    Group,
    attempt_of,
    check_groups,
    describe,
    first_sample,
    is_finished,
)
from slime.utils.types import Sample, flatten_samples, version_number

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]  # sample index, attempt, response tokens at the start
_NEW = vars(Sample())  # what a stored sample leaves out
_NOT_STORED = ("multimodal_inputs", "trace")
_UNCHANGING = frozenset({type(None), bool, int, float, str})
_GREEDY = "greedy_baseline"  # in the metadata of an answer that is only compared with


class Ledger:
    """Reports the events of one run. `settings`: digest of what samples depend on; others' are not recalled.

    `keeps`: store finished samples until a checkpoint covers them (a run without checkpoints never resumes).
    `any_version`: samples of other weights than the engines hold may be used (the pool judges their age).
    `private`: no user function holds finished samples, which it could change in place.
    """

    def __init__(
        self,
        writer: RecordWriter,
        settings: str,
        *,
        keeps: bool = True,
        any_version: bool = False,
        private: bool = False,
        known: Mapping[Key, FinishedEntry] | None = None,
    ):
        self._writer, self.settings = writer, settings
        self._keeps, self._any_version, self._private = keeps, any_version, private
        self._known = dict(known or {})
        self._rollout = 0  # that events belong to
        self._version: int | None = None  # of the engines when it began
        self._open: dict[int, Group] = {}  # groups handed out and not decided
        self._decided: list[int] = []  # since the last cut
        self._cut: dict[int, list[int]] = {}  # rollout -> groups decided in it, until its batch is kept
        self._kept: dict[int, Group] = {}  # since the last cut
        self._last_commits: list[int] = []

    def _note(
        self,
        event: Event,
        rollout: int | None = None,
        *,
        group: int | None = None,
        sample: int | None = None,
        attempt: int | None = None,
        value: str | None = None,
        also: Any = None,
    ) -> None:
        number = self._rollout if rollout is None else rollout
        self._writer.note(Note(time.time(), event, number, group, sample, attempt, value, also))

    def _of_group(self, event: Event, group: tuple[int, int], value: str | None = None) -> Note:
        """Return an event of a group, given by its index and attempt."""
        return Note(time.time(), event, self._rollout, group[0], None, group[1], value)

    def _tell(self, notes: Sequence[Note]) -> None:
        if notes:
            self._writer.note(*notes)

    # -- groups, as a journal (slime.rollout.journal)

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None:
        self._issued(groups, "buffer" if from_buffer else "new")

    def issued_by_users_source(self, groups: Sequence[Group]) -> None:
        """Report groups of a user's data source that keeps no journal."""
        self._issued(groups, "own")

    def _issued(self, groups: Sequence[Group], source: str) -> None:
        found = [(at, group) for group in groups if (at := _group(group)) is not None]
        self._open.update([(at[0], group) for at, group in found])
        self._tell([self._of_group("issued", at, source) for at, _ in found])

    def returned(self, groups: Sequence[Group]) -> None:
        found = [at for at, _ in self._as_issued(groups)]
        self._decide(found)
        self._tell([self._of_group("returned", group) for group in found])

    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        found = self._as_issued(groups)
        self._decide([at for at, _ in found])
        if outcome == "trained":
            self._kept.update([(at[0], group) for at, group in found])
            self._tell([self._of_group("kept", at, _indices(group)) for at, group in found])
        else:
            why = f"{outcome}: {reason}" if reason else outcome
            self._tell([self._of_group("dropped", at, why) for at, _ in found])

    def _as_issued(self, groups: Sequence[Group]) -> list[tuple[tuple[int, int], Group]]:
        """Return each group with its attempt and the index it was issued with; functions may change it."""
        found = [(at, group) for group in groups if (at := _group(group)) is not None]
        if all([at[0] in self._open for at, _ in found]):
            return found
        by_sample = {s.index: known for known, group in self._open.items() for s in flatten_samples(group)}
        by_sample.pop(None, None)
        return [
            (
                (at[0] if at[0] in self._open else by_sample.get(first_sample(group).index, at[0]), at[1]),
                group,
            )
            for at, group in found
        ]

    def _decide(self, groups: Sequence[tuple[int, int]]) -> None:
        for index, _ in groups:
            self._open.pop(index, None)
            self._decided.append(index)

    # -- samples

    def recall(self, entry: Entry) -> Entry | None:
        """Return the entry as it was finished before the crash; None: it was not finished."""
        key = _key(entry)
        found = self._known.get(key) if key is not None else None
        if found is None or not (self._any_version or found.version == self._version):
            return None
        assert isinstance(entry, Sample)
        del self._known[key]  # type: ignore[arg-type]
        try:
            stored, is_fan_out = found.load()
            samples = [Sample.from_dict(fields) for fields in stored]
        except (ValueError, TypeError, LookupError) as error:
            logger.warning("%s is damaged in the ledger, and generated again: %s", describe(entry), error)
            return None
        for sample in samples:
            if sample.multimodal_inputs is None:
                sample.multimodal_inputs = entry.multimodal_inputs  # of the prompt, as it was read again
        self._note("recalled", group=entry.group_index, sample=entry.index, attempt=attempt_of(entry))
        return samples if is_fan_out else samples[0]

    def finished(self, origin: Entry, made: Entry) -> None:
        """Record that `origin` was generated, and scored unless rewards are computed for whole groups."""
        key = _key(origin)
        if key is not None and not is_finished(origin):
            assert isinstance(origin, Sample), "only samples have a key"
            self._finished(
                key, origin.group_index, flatten_samples([made]), is_fan_out=isinstance(made, list)
            )

    def _finished(
        self, key: Key, group_index: int | None, samples: list[Sample], *, is_fan_out: bool = False
    ) -> None:
        keep: Callable[[], bytes | None] | None = None
        if self._keeps and all(map(_is_whole, samples)):
            # The copies share lists of numbers with the samples, which nobody but a user's function changes.
            copies = [{**vars(sample), "metadata": dict(sample.metadata)} for sample in samples]
            keep = functools.partial(_encode_samples, copies, is_fan_out)
            if not (self._private and all(map(_is_unchanging, samples))):
                keep = functools.partial(_given, keep())
        version = newest_version([*samples])
        note = Finished(
            time.time(),
            self._rollout,
            group_index,
            self.settings,
            (*key, self._version if version is None else version),
            samples[-1].status.value,
            _own(_rewards(samples)) if any(map(_is_scored, samples)) else None,
            keep,
        )
        self._writer.note(note)

    def scored(self, group: Group) -> None:
        """Record the rewards of a group whose samples were scored together."""
        value = json_text(_rewards(flatten_samples(group)))
        self._tell([self._of_group("scored", at, value) for at in _groups([group])])

    # -- rollouts and steps

    def resumed(self, committed: int, last_made: int) -> None:
        """Record that the run resumes after step `committed` (-1: none), with rollouts up to `last_made`."""
        self._rollout = last_made + 1
        self._last_commits = [committed]
        self._note("resumed", committed, value=str(last_made), also=forget_rollouts(after=last_made))

    def begin(self, rollout_id: int, version: str | None) -> None:
        self._rollout = max(self._rollout, rollout_id)
        self._version = version_number(version)

    def cut(self, rollout_id: int) -> None:
        """Assign all events until now to this rollout or earlier ones: its cursor is being taken."""
        if rollout_id < self._rollout:
            return
        self._cut[rollout_id] = self._decided
        self._decided, self._kept = [], {}
        self._note("cut", rollout_id)
        self._rollout = rollout_id + 1

    def account_for(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """Report groups that the rollout function returned without reporting them."""
        if rollout_id < self._rollout:
            return  # a rollout function that cuts reports too
        if self._kept.keys() >= {sample.group_index for sample in samples}:  # of nearly all rollouts
            return
        told = {sample.index for group in self._kept.values() for sample in flatten_samples(group)} - {None}
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            index = sample.group_index
            if index is not None and index >= 0 and index not in self._kept and sample.index not in told:
                groups.setdefault(index, []).append(sample)
        for index, group in groups.items():
            if index not in self._open:
                self._issued([list(group)], "own")
            self.consumed([list(group)], "trained")

    def made(self, rollout_id: int, value: Mapping[str, Any]) -> None:
        """Store a complete batch: a run that is killed later trains on this very batch."""
        keep = keep_rollout(rollout_id, self.settings, dict(value)) if self._keeps else None
        done = [number for number in self._cut if number <= rollout_id]
        decided = [group for number in done for group in self._cut.pop(number)]
        self._note("made", rollout_id, also=ForgetEntries(decided, keep))

    def trained(self, rollout_id: int) -> None:
        self._note("consumed", rollout_id)

    def committed(self, rollout_id: int) -> None:
        """Drop what the previous checkpoint covers; keep what this one covers, in case it is damaged."""
        before = self._last_commits[-1] if self._last_commits else -1
        self._last_commits = [before, rollout_id]
        self._note("committed", rollout_id, also=forget_rollouts(up_to=before))

    def evaluated(self, rollout_id: int) -> None:
        self._note("evaluated", rollout_id)


def follow(data_source: Any, ledger: Ledger) -> None:
    """Make any data source report to the ledger: through its journal, or through wrapped methods."""
    journal = getattr(data_source, "journal", None)  # a user's source may have none
    if isinstance(journal, CountingJournal):
        journal.follower = ledger
        return
    get_samples, add_samples = data_source.get_samples, data_source.add_samples

    def get_and_report(num_samples: int) -> list[Group]:
        groups = check_groups(get_samples(num_samples))
        ledger.issued_by_users_source(groups)
        return groups

    def add_and_report(samples: list[Group]) -> None:
        add_samples(samples)
        ledger.returned(samples)

    try:
        data_source.get_samples, data_source.add_samples = get_and_report, add_and_report
    except AttributeError:  # __slots__
        logger.info("%s takes no attributes: only what is trained is in the ledger", type(data_source))


_current: Ledger | None = None


def use(ledger: Ledger | None) -> None:
    """Set the ledger that the rollout functions of this process report to."""
    global _current
    _current = ledger


def current() -> Ledger | None:
    return _current


def _groups(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Return index and attempt of each group that has an index."""
    return [at for at in map(_group, groups) if at is not None]


def _group(group: Group) -> tuple[int, int] | None:
    """Return the group's index and attempt; None: it has no index, or no sample."""
    first = group[0] if isinstance(group, list) and group else group
    if not isinstance(first, Sample):
        samples = flatten_samples([group])
        if not samples:
            return None
        first = samples[0]
    return None if first.group_index is None else (first.group_index, attempt_of(first))


def _indices(group: Group) -> str:
    """Return the indices of a group's samples as JSON."""
    return json.dumps(sorted({int(s.index) for s in flatten_samples(group) if s.index is not None}))


def _key(entry: Entry) -> Key | None:
    """Return the key of a sample; None if it has no index or is not for training."""
    if isinstance(entry, list) or entry.index is None:
        return None
    if not entry.metadata:  # of most
        return entry.index, 0, entry.response_length
    return None if entry.metadata.get(_GREEDY) else (entry.index, attempt_of(entry), entry.response_length)


def _is_whole(sample: Sample) -> bool:
    """Return whether a sample is finished and its reward did not fail."""
    return sample.status in FINISHED and sample.reward_failure is None


def _is_unchanging(sample: Sample) -> bool:
    """Return whether slime changes nothing in place that a shallow copy shares with the sample."""
    return not sample.metadata and not sample.generate_function_path and type(sample.reward) in _UNCHANGING


def _encode_samples(several: list[dict[str, Any]], is_fan_out: bool) -> bytes | None:
    """Encode the fields of samples for `Sample.from_dict`, without media and what every new sample has."""
    value = {"fan_out": is_fan_out, "samples": [_stored_fields(fields) for fields in several]}
    return encode_or_skip(value, f"sample {several[0]['index']}")


def _stored_fields(fields: dict[str, Any]) -> dict[str, Any]:
    stored = {
        name: value for name, value in fields.items() if name not in _NOT_STORED and not _is_new(name, value)
    }
    stored["status"] = fields["status"].value
    for name in ("spec_info", "prefix_cache_info"):
        stored[name] = vars(fields[name])
    return stored


def _is_new(name: str, value: Any) -> bool:
    """Return whether every new sample has this value, by identity: 0.0 equals -0.0, and 1 equals True."""
    new = _NEW.get(name, _NEW)
    return value is new or (type(value) in (list, dict) and type(value) is type(new) and not value)


def _given(data: bytes | None) -> bytes | None:
    return data


def _is_scored(sample: Sample) -> bool:
    return sample.reward is not None or sample.reward_failure is not None


def _reward(sample: Sample) -> Any:
    return sample.reward if sample.reward_failure is None else sample.reward_failure.kind


def _own(reward: Any) -> Any:
    """Return a reward that nobody changes any more."""
    return reward if type(reward) in _UNCHANGING else json.loads(json_text(reward))


def _rewards(samples: Sequence[Sample]) -> Any:
    values = list(map(_reward, samples))
    return values[0] if len(values) == 1 else values
