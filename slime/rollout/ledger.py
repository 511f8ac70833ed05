"""The durable side of the data buffer: reports every event of groups and samples to the record of the run.

After a crash it gives back what was finished: `recall` answers with the sample as it was generated and
scored, so that only unfinished ones are generated again. The data source reports through its journal, the
generate functions through `recall` and `finished`; whatever a rollout function returns is accounted for by
the rollout manager, also if that function and its data source know nothing of this file.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.record.ledger_rows import (
    Event,
    Finished,
    FinishedEntry,
    ForgetEntries,
    Note,
    forget_rollouts,
    keep_rollout,
)
from slime.record.writer import RecordWriter
from slime.rollout.collection.versions import newest_version
from slime.rollout.journal import CountingJournal, Outcome
from slime.rollout.prompt_groups import FINISHED, Entry, Group, attempt_of, is_finished
from slime.utils.types import Sample, flatten_samples, version_number

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]  # sample index, attempt, response tokens at the start
_NOT_KEPT = frozenset({"multimodal_inputs", "trace"})
_UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})
_FEW_TOKENS = 100
_encode = json.JSONEncoder(default=str).encode  # `json.dumps` makes one for each call
# The fields of a sample by what they hold: of most samples, most are as in a new one.
_NEW = vars(Sample())
_FIELDS = _NEW.keys()
_OF_NUMBERS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
_COUNTS = {name: vars(_NEW[name]) for name in ("spec_info", "prefix_cache_info")}
_APART = {*_OF_NUMBERS, *_COUNTS, *_NOT_KEPT, "status", "version_spans"}
_CONTAINERS = {n: v for n, v in _NEW.items() if isinstance(v, (list, dict)) and n not in _APART}
_MAY_BE_NEW = {**_CONTAINERS, **_COUNTS}
_PLAIN = tuple(name for name in _NEW if name not in _APART and name not in _CONTAINERS)
_PLAIN_NEW = tuple(_NEW[name] for name in _PLAIN)
_plain_values = operator.itemgetter(*_PLAIN)
_TEXT_OR_NUMBER = ("group_index", "index", "rollout_id", "response", "response_length")  # never containers
_MAY_HOLD_MORE = tuple(name for name in _PLAIN if name not in _TEXT_OR_NUMBER)
_more_values = operator.itemgetter(*_MAY_HOLD_MORE)
_GREEDY = "greedy_baseline"  # in the metadata of an answer that is only compared with


class Ledger:
    """One for each run. `settings`: digest of what samples depend on; others' samples are not taken.

    `keeps`: finished samples are kept whole until a checkpoint covers them (without checkpoints nothing goes
    on). `any_version`: samples of other weights than the engines hold may be used (the pool judges their
    age).
    """

    def __init__(
        self,
        writer: RecordWriter,
        settings: str,
        *,
        keeps: bool = True,
        any_version: bool = False,
        known: Mapping[Key, FinishedEntry] | None = None,
    ):
        self._writer, self.settings = writer, settings
        self._keeps, self._any_version = keeps, any_version
        self._known = dict(known or {})
        self._rollout = 0  # that events belong to
        self._version: int | None = None  # of the engines when it began
        self._open: dict[int, int] = {}  # groups handed out and not decided -> attempt
        self._decided: list[int] = []  # since the last cut
        self._cut: dict[int, list[int]] = {}  # rollout -> groups decided in it, until its batch is kept
        self._kept: set[int] = set()  # since the last cut
        self._last_commits: list[int] = []
        self._finished_now: list[tuple[float, Key, Sample]] = []  # in this round of the event loop

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
        if self._finished_now:
            self.write_down()
        self._writer.note(Note(time.time(), event, number, group, sample, attempt, value, also))

    # -- groups, as a journal (slime.rollout.journal)

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None:
        self._issued(groups, "buffer" if from_buffer else "new")

    def _issued(self, groups: Sequence[Group], source: str) -> None:
        for index, attempt in _groups(groups):
            self._open[index] = attempt
            self._note("issued", group=index, attempt=attempt, value=source)

    def returned(self, groups: Sequence[Group]) -> None:
        for index, attempt in _groups(groups):
            self._decide(index)
            self._note("returned", group=index, attempt=attempt)

    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        for group in groups:
            for index, attempt in _groups([group]):
                self._decide(index)
                if outcome == "trained":
                    self._keep(group, index, attempt)
                else:
                    why = f"{outcome}: {reason}" if reason else outcome
                    self._note("dropped", group=index, attempt=attempt, value=why)

    def _decide(self, index: int) -> None:
        self._open.pop(index, None)
        self._decided.append(index)

    def _keep(self, group: Group, index: int, attempt: int) -> None:
        self._kept.add(index)
        samples = sorted({s.index for s in flatten_samples(group) if s.index is not None})
        self._note("kept", group=index, attempt=attempt, value=json.dumps(samples))

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
        samples = [_from_kept(fields) for fields in found.samples()]
        for sample in samples:
            if sample.multimodal_inputs is None:
                sample.multimodal_inputs = entry.multimodal_inputs  # of the prompt, as it was read again
        self._note("recalled", group=entry.group_index, sample=entry.index, attempt=attempt_of(entry))
        return samples if found.is_fan_out else samples[0]

    def finished(self, origin: Entry, made: Entry) -> None:
        """`origin` was generated (and scored, where rewards are not those of groups)."""
        key = _key(origin)
        if key is not None and not is_finished(origin):
            assert isinstance(origin, Sample), "only these have a key"
            self._writer.note(self._finished(key, origin.group_index, made, time.time()))

    def finished_from_prompt(self, sample: Sample) -> None:
        """The same of a sample that began with its prompt and is one still."""
        key = _key(sample)
        if key is None:
            return
        if not self._finished_now:
            try:  # whoever waits for the sample comes after this: nobody has changed it until then
                asyncio.get_running_loop().call_soon(self.write_down)
            except RuntimeError:  # no loop: a rollout function of the user's
                note = self._finished((key[0], key[1], 0), sample.group_index, sample, time.time())
                self._writer.note(note)
                return
        self._finished_now.append((time.time(), (key[0], key[1], 0), sample))

    def write_down(self) -> None:
        """The samples that were finished in this round: together they cost half as much as one by one."""
        finished, self._finished_now = self._finished_now, []
        if finished:
            self._writer.note(*[self._finished(key, s.group_index, s, when) for when, key, s in finished])

    def _finished(self, key: Key, group_index: int | None, made: Entry, when: float) -> Finished:
        samples = [made] if isinstance(made, Sample) else flatten_samples([made])
        whole, is_scored, size = self._keeps, False, 0
        for sample in samples:  # with its own reward, if any
            failed = sample.reward_failure is not None
            whole = whole and sample.status in FINISHED and not failed
            is_scored = is_scored or failed or sample.reward is not None
            size += len(sample.tokens)
        version = _newest_version(samples)
        return Finished(
            when,
            self._rollout,
            group_index,
            *key,
            self._version if version is None else version,
            self.settings,
            samples[-1].status.value,
            _rewards(samples),
            is_scored,
            [_own_fields(s) for s in samples] if whole else None,
            _kept_columns,
            isinstance(made, list),
            size <= _FEW_TOKENS,
        )

    def scored(self, group: Group) -> None:
        """The samples of a group got their rewards together."""
        for index, attempt in _groups([group]):
            self._note(
                "scored", group=index, attempt=attempt, value=_encode(_rewards(flatten_samples(group)))
            )

    # -- rollouts and steps

    def resumed(self, committed: int, last_made: int) -> None:
        """This start goes on after step `committed` (-1: anew) and has rollouts up to `last_made`."""
        self._rollout = last_made + 1
        self._last_commits = [committed]
        self._note("resumed", committed, value=str(last_made), also=forget_rollouts(after=last_made))

    def begin(self, rollout_id: int, version: str | None) -> None:
        self._rollout = max(self._rollout, rollout_id)
        self._version = version_number(version)

    def cut(self, rollout_id: int) -> None:
        """Everything until now belongs to this rollout or one before: its cursor is being taken."""
        if rollout_id < self._rollout:
            return
        self._cut[rollout_id] = self._decided
        self._decided, self._kept = [], set()
        self._note("cut", rollout_id)
        self._rollout = rollout_id + 1

    def account_for(self, rollout_id: int, samples: Sequence[Any]) -> None:
        """What the rollout function returned and nobody reported: groups of its own, of its own source."""
        if rollout_id < self._rollout:
            return  # a rollout function that cuts reports too
        groups: dict[int, list[Sample]] = {}
        for sample in flatten_samples(samples):
            index = sample.group_index
            if index is not None and index >= 0 and index not in self._kept:
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
        groups: list[Group] = get_samples(num_samples)
        ledger.issued(groups, from_buffer=False)
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
    firsts = [samples[0] for group in groups if (samples := flatten_samples([group]))]
    return [(s.group_index, attempt_of(s)) for s in firsts if s.group_index is not None]


def _key(entry: Entry) -> Key | None:
    """What a sample is known by; None where it cannot be told from others, or is not for training."""
    if isinstance(entry, list) or entry.index is None:
        return None
    if not entry.metadata:  # of most
        return entry.index, 0, entry.response_length
    return None if entry.metadata.get(_GREEDY) else (entry.index, attempt_of(entry), entry.response_length)


def _own_fields(sample: Sample) -> dict[str, Any]:
    """Everything that the sample is made again from, as it is now: others may go on to change the sample."""
    fields = sample.__dict__.copy()
    for name in _OF_NUMBERS:
        if (value := fields[name]) is not None:
            fields[name] = value[:] if type(value) is list else _own(value)
    for name in _CONTAINERS:
        if (value := fields[name]) or type(value) not in (list, dict):
            fields[name] = value.copy() if _is_flat(value) else _own(value)
    fields["spec_info"] = sample.spec_info.__dict__.copy()
    fields["prefix_cache_info"] = sample.prefix_cache_info.__dict__.copy()
    if not _UNCHANGING.issuperset(map(type, _more_values(fields))):
        fields.update({name: _own(fields[name]) for name in _MAY_HOLD_MORE})
    fields["version_spans"] = tuple(fields["version_spans"])
    if len(fields) > len(_FIELDS) + ("trace" in fields):  # attached later, as that is in nearly all
        for name in fields.keys() - _FIELDS - _NOT_KEPT:
            fields[name] = _own(fields[name])
    return fields


def _kept_columns(several: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What is written of `_own_fields`: no media, no times of work, nothing that all new samples have."""
    plain = zip(_PLAIN, _PLAIN_NEW, zip(*map(_plain_values, several), strict=True), strict=True)
    columns = {n: list(v) for n, new, v in plain if not all(map(operator.is_, v, itertools.repeat(new)))}
    for name in _OF_NUMBERS:
        values = [fields[name] for fields in several]
        if not all(map(operator.is_, values, itertools.repeat(None))):  # arrays have an == of their own
            columns[name] = values
    for name, new in _MAY_BE_NEW.items():
        values = [fields[name] for fields in several]
        if set(map(type, values)) != {type(new)} or values.count(new) < len(values):
            columns[name] = values
    columns["status"] = [fields["status"]._value_ for fields in several]
    columns["version_spans"] = [_spans_text(fields["version_spans"]) for fields in several]
    for name in several[0].keys() - _FIELDS - _NOT_KEPT:  # attached later
        columns[name] = [fields[name] for fields in several]
    return columns


@functools.lru_cache(maxsize=1024)
def _spans_text(spans: tuple[tuple[str, int, int], ...]) -> str:
    """Most samples of a rollout have the same."""
    return _encode(spans)


def _newest_version(samples: Sequence[Sample]) -> int | None:
    if len(samples) == 1:
        return _newest_of(tuple(samples[0].version_spans))
    return newest_version(list(samples))


@functools.lru_cache(maxsize=1024)
def _newest_of(spans: tuple[tuple[str, int, int], ...]) -> int | None:
    return newest_version([Sample(version_spans=list(spans))])


def _from_kept(fields: dict[str, Any]) -> Sample:
    spans = fields["version_spans"]
    return Sample.from_dict({**fields, "version_spans": json.loads(spans) if spans else []})


def _is_flat(value: Any) -> bool:
    """Whether it is a list or a dict of what nobody changes, as the versions of weights are."""
    kind = type(value)
    return (kind is list or kind is dict) and _UNCHANGING.issuperset(
        map(type, value if kind is list else value.values())
    )


def _own(value: Any) -> Any:
    """The same value, which nobody else changes; what no file can hold stays as it is."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list or kind is tuple or kind is set:
        return kind(map(_own, value))
    if kind is dict:
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if kind.__module__ == "torch" and hasattr(value, "detach") else value


def _rewards(samples: Sequence[Sample]) -> Any:
    values = [s.reward_failure.kind if s.reward_failure is not None else s.reward for s in samples]
    return values[0] if len(values) == 1 else values
