"""The durable side of the data buffer: reports every event of groups and samples to the record of the run.

After a crash it gives back what was finished: `recall` answers with the sample as it was generated and
scored, so that only unfinished ones are generated again. The data source reports through its journal, the
generate functions through `recall` and `finished`; whatever a rollout function returns is accounted for by
the rollout manager, also if that function and its data source know nothing of this file.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.record.any_json import any_json, plain_or_text
from slime.record.ledger_rows import (
    Event,
    Finished,
    FinishedEntry,
    ForgetEntries,
    JustFinished,
    Kept,
    Note,
    forget_rollouts,
    keep_rollout,
)
from slime.record.writer import RecordWriter
from slime.rollout.collection.versions import newest_version
from slime.rollout.journal import CountingJournal, Outcome
from slime.rollout.kept_samples import (
    Alike,
    Seen,
    as_they_are,
    columns_of,
    find_alike,
    from_kept,
    is_alone,
    is_whole,
    look_at,
)
from slime.rollout.prompt_groups import (
    ATTEMPT_KEY,
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

Fields = dict[str, Any]  # of a sample, by their names
Key = tuple[int, int, int]  # sample index, attempt, response tokens at the start
_encode = json.JSONEncoder(default=plain_or_text).encode  # `json.dumps` makes one for each call
_SAMPLES, _INTS = frozenset({Sample}), frozenset({int})
_GREEDY = "greedy_baseline"  # in the metadata of an answer that is only compared with


class Ledger:
    """One for each run. `settings`: digest of what samples depend on; others' samples are not taken.

    `keeps`: finished samples are kept whole until a checkpoint covers them (without checkpoints nothing goes
    on). `any_version`: samples of other weights than the engines hold may be used (the pool judges their
    age). `private`: no function of the user's gets finished samples in hand: it might change them in place.
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
        self._sort = functools.partial(self._sort_seen, None)
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
        """`group`: index and attempt."""
        return Note(time.time(), event, self._rollout, group[0], None, group[1], value)

    def _tell(self, notes: Sequence[Note]) -> None:
        if notes:
            self._writer.note(*notes)

    # -- groups, as a journal (slime.rollout.journal)

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None:
        self._issued(groups, "buffer" if from_buffer else "new")

    def issued_by_users_source(self, groups: Sequence[Group]) -> None:
        """By one that keeps no journal: how it counts, and what it gives out again, is its own."""
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
        """Each with the number it was handed out by and its attempt: a function may have given it another."""
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

    @property
    def may_recall(self) -> bool:
        """Whether anything is left of what was finished before a crash."""
        return bool(self._known)

    def recall(self, entry: Entry) -> Entry | None:
        """The entry as it was finished before the crash; None: it was not."""
        key = _key(entry)
        found = self._known.get(key) if key is not None else None
        if found is None or not (self._any_version or found.version == self._version):
            return None
        assert isinstance(entry, Sample)
        del self._known[key]  # type: ignore[arg-type]
        try:
            samples, is_fan_out = [from_kept(fields) for fields in found.samples()], found.is_fan_out
        except (ValueError, TypeError, LookupError) as error:
            logger.warning("%s is damaged in the ledger, and generated again: %s", describe(entry), error)
            return None
        for sample in samples:
            if sample.multimodal_inputs is None:
                sample.multimodal_inputs = entry.multimodal_inputs  # of the prompt, as it was read again
        self._note("recalled", group=entry.group_index, sample=entry.index, attempt=attempt_of(entry))
        return samples if is_fan_out else samples[0]

    def finished(self, origin: Entry, made: Entry) -> None:
        """`origin` was generated (and scored, where rewards are not those of groups)."""
        key = _key(origin)
        if key is not None and not is_finished(origin):
            assert isinstance(origin, Sample), "only these have a key"
            if isinstance(made, Sample):
                [fields] = as_they_are([made])
                about = (self._version, time.time(), self._rollout, origin.group_index)
                self._writer.note(self._finished(*about, [(key, fields)]))
            else:
                self._writer.note(self._fanned_out(origin.group_index, key, flatten_samples(made)))

    def finished_from_prompt(self, samples: Sequence[Sample]) -> None:
        """The same of samples that began with their prompts and are one each still; nobody else has them."""
        if self._private:
            fields = [sample.__dict__ for sample in samples]
            seen = look_at(fields)
            if seen is not None:  # of most
                self._writer.note(JustFinished(time.time(), self._rollout, (seen, fields), self._sort))
                return
        several = as_they_are(samples)
        if self._private and not any([fields["generate_function_path"] for fields in several]):
            sort = functools.partial(self._sort_out, self._version)
            self._writer.note(JustFinished(time.time(), self._rollout, several, sort))
        elif notes := self._sort_out(self._version, time.time(), self._rollout, several):
            self._writer.note(*notes)

    def _sort_seen(
        self, version: int | None, time: float, rollout: int, seen_of: tuple[Seen, Sequence[Fields]]
    ) -> list[Finished]:
        """What there is to write of samples that nobody else has in hand. `version`: of the engines.

        Nearly all that end together are alike.
        """
        seen, several = seen_of
        alike = find_alike(seen, several)
        if alike is None:
            return self._sort_out(version, time, rollout, seen.fields_of(several))
        rewards = dict(zip(alike.indices, alike.rewards, strict=True))
        if None in alike.rewards:
            rewards = {index: reward for index, reward in rewards.items() if reward is not None}
        kept = functools.partial(_kept_alike, alike, seen, several, version) if self._keeps else None
        about = (time, rollout, alike.group_index, 0, self.settings)
        return [Finished(*about, {alike.status: alike.indices}, rewards, kept)]

    def _sort_out(
        self, version: int | None, time: float, rollout: int, several: Sequence[Fields]
    ) -> list[Finished]:
        """The same of any samples that began with their prompts: by groups, large ones by themselves."""
        together: dict[tuple[int | None, int, int | None], list[tuple[Key, Fields]]] = {}
        for fields in several:
            index, metadata = fields["index"], fields["metadata"]
            if index is not None and not metadata.get(_GREEDY):
                attempt = int(metadata.get(ATTEMPT_KEY, 0))
                at = (fields["group_index"], attempt, index if is_alone(fields) else None)
                together.setdefault(at, []).append(((index, attempt, 0), fields))
        return [self._finished(version, time, rollout, at[0], made) for at, made in together.items()]

    def _finished(
        self,
        version: int | None,
        time: float,
        rollout: int,
        group_index: int | None,
        made: Sequence[tuple[Key, Fields]],
    ) -> Finished:
        """Of samples that are kept in one piece, each with its key."""
        statuses: dict[str, list[int]] = {}
        rewards: dict[int, Any] = {}
        for (index, _, _), fields in made:
            statuses.setdefault(fields["status"]._value_, []).append(index)
            if (failure := fields["reward_failure"]) is not None:
                rewards[index] = failure.kind
            elif (reward := fields["reward"]) is not None:
                rewards[index] = reward
        kept: Callable[[], Kept] | None = None
        if self._keeps:
            kept = functools.partial(_kept, made, version)
            # Whoever else has them in hand may still change them.
            if not self._private or any(fields["generate_function_path"] for _, fields in made):
                kept = _given(kept())
        about = (time, rollout, group_index, made[0][0][1], self.settings)
        return Finished(*about, statuses, rewards, kept)

    def _fanned_out(self, group_index: int | None, key: Key, siblings: Sequence[Sample]) -> Finished:
        """The same of an entry that became several samples."""
        kept: Callable[[], Kept] | None = None
        if self._keeps and all(is_whole(vars(sample)) for sample in siblings):
            version = newest_version(list(siblings))
            found = [(*key, self._version if version is None else version)]
            kept = _given(Kept(found, [columns_of([vars(sample)]) for sample in siblings], is_fan_out=True))
        return Finished(
            time.time(),
            self._rollout,
            group_index,
            key[1],
            self.settings,
            {siblings[-1].status._value_: [key[0]]},
            {key[0]: _rewards(siblings)} if any(map(_is_scored, siblings)) else {},
            kept,
        )

    def scored(self, group: Group) -> None:
        """The samples of a group got their rewards together."""
        value = any_json(_encode, _rewards(flatten_samples(group)))
        self._tell([self._of_group("scored", at, value) for at in _groups([group])])

    # -- rollouts and steps

    def resumed(self, committed: int, last_made: int) -> None:
        """This start goes on after step `committed` (-1: anew) and has rollouts up to `last_made`."""
        self._rollout = last_made + 1
        self._last_commits = [committed]
        self._note("resumed", committed, value=str(last_made), also=forget_rollouts(after=last_made))

    def begin(self, rollout_id: int, version: str | None) -> None:
        self._rollout = max(self._rollout, rollout_id)
        self._version = version_number(version)
        self._sort = functools.partial(self._sort_seen, self._version)

    def cut(self, rollout_id: int) -> None:
        """Everything until now belongs to this rollout or one before: its cursor is being taken."""
        if rollout_id < self._rollout:
            return
        self._cut[rollout_id] = self._decided
        self._decided, self._kept = [], {}
        self._note("cut", rollout_id)
        self._rollout = rollout_id + 1

    def account_for(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """What the rollout function returned and nobody reported: groups of its own, of its own source."""
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
        """The batch is whole: a run that is killed from now on trains on this very one."""
        keep = keep_rollout(rollout_id, self.settings, dict(value)) if self._keeps else None
        done = [number for number in self._cut if number <= rollout_id]
        decided = [group for number in done for group in self._cut.pop(number)]
        self._note("made", rollout_id, also=ForgetEntries(decided, keep))

    def trained(self, rollout_id: int) -> None:
        self._note("consumed", rollout_id)

    def committed(self, rollout_id: int) -> None:
        """What the checkpoint before covers is not needed whole any more; of this one's it is: damage."""
        before = self._last_commits[-1] if self._last_commits else -1
        self._last_commits = [before, rollout_id]
        self._note("committed", rollout_id, also=forget_rollouts(up_to=before))

    def evaluated(self, rollout_id: int) -> None:
        self._note("evaluated", rollout_id)


def follow(data_source: Any, ledger: Ledger) -> None:
    """Have any data source report to the ledger: by its journal, or by the calls it gets."""
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
    """The ledger that the rollout functions of this process report to."""
    global _current
    _current = ledger


def current() -> Ledger | None:
    return _current


def _groups(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Index and attempt of those that have an index."""
    return [at for at in map(_group, groups) if at is not None]


def _group(group: Group) -> tuple[int, int] | None:
    """Its index and attempt; None: it has no index, or no sample."""
    first = group[0] if isinstance(group, list) and group else group
    if not isinstance(first, Sample):
        samples = flatten_samples([group])
        if not samples:
            return None
        first = samples[0]
    return None if first.group_index is None else (first.group_index, attempt_of(first))


def _indices(group: Group) -> str:
    """Of its samples, as JSON, which whole numbers are written as by Python."""
    are_single = _SAMPLES.issuperset(map(type, group))  # as most are
    samples: Sequence[Any] = group if are_single else flatten_samples(group)
    indices = {sample.index for sample in samples}
    if not _INTS.issuperset(map(type, indices)):
        indices = {int(index) for index in indices if index is not None}
    return str(sorted(indices))


def _key(entry: Entry) -> Key | None:
    """What a sample is known by; None where it cannot be told from others, or is not for training."""
    if isinstance(entry, list) or entry.index is None:
        return None
    if not entry.metadata:  # of most
        return entry.index, 0, entry.response_length
    return None if entry.metadata.get(_GREEDY) else (entry.index, attempt_of(entry), entry.response_length)


@functools.lru_cache(maxsize=1024)
def _newest_of(spans: tuple[tuple[str, int, int], ...]) -> int | None:
    """Most samples of a rollout have the same."""
    return newest_version([Sample(version_spans=list(spans))])


def _kept(made: Sequence[tuple[Key, Fields]], version: int | None) -> Kept:
    """Of samples that are whole; `version`: of the engines, for those that name none."""
    whole = [(key, fields) for key, fields in made if is_whole(fields)]
    versions = [_newest_of(tuple(fields["version_spans"])) for _, fields in whole]
    keys = [(*key, version if v is None else v) for (key, _), v in zip(whole, versions, strict=True)]
    return Kept(keys, [columns_of([fields for _, fields in whole])] if whole else [])


def _kept_alike(alike: Alike, seen: Seen, several: Sequence[Fields], version: int | None) -> Kept:
    fields = seen.fields_of(several)
    return _kept([((index, 0, 0), one) for index, one in zip(alike.indices, fields, strict=True)], version)


def _given(kept: Kept) -> Callable[[], Kept]:
    """What is copied already: nobody changes it any more."""
    return lambda: kept


def _is_scored(sample: Sample) -> bool:
    return sample.reward is not None or sample.reward_failure is not None


def _reward(sample: Sample) -> Any:
    return sample.reward if sample.reward_failure is None else sample.reward_failure.kind


def _rewards(samples: Sequence[Sample]) -> Any:
    values = list(map(_reward, samples))
    return values[0] if len(values) == 1 else values
