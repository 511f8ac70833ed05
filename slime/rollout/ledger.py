"""Reports every event of groups and samples to the record of the run, and restores finished samples.

After a crash `recall` returns samples as they were generated and scored, so that only unfinished ones are
generated again. The rollout manager reports whatever else a user's rollout function returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slime.record.ledger_rows import (
    AnyNote,
    Event,
    Finished,
    FinishedEntry,
    ForgetEntries,
    KeepEpisode,
    Note,
    encode_or_skip,
    forget_rollouts,
    keep_rollout,
)
from slime.record.texts import json_text
from slime.rollout.collection.versions import newest_version
from slime.rollout.prompt_groups import (
    FINISHED,
    Entry,
    Group,
    Outcome,
    attempt_of,
    describe,
    first_sample,
    is_finished,
)
from slime.utils.packed_samples import from_fields, references_in
from slime.utils.stored_arrays import StoredArray
from slime.utils.types import Sample, flatten_samples, version_number

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]  # sample index, attempt, response tokens at the start
_NOT_STORED = ("multimodal_inputs", "trace")
_GREEDY = "greedy_baseline"  # in the metadata of an answer that is only compared with


class Writer(Protocol):
    """Takes events: the record's writer, or a rollout worker, which sends them to the driver."""

    def note(self, *notes: AnyNote) -> None: ...

    async def written(self) -> None: ...


class Ledger:
    """Reports the events of one run. `settings`: digest of what samples depend on; others' are not recalled.

    `keeps`: store finished samples until a checkpoint covers them (a run without checkpoints never resumes).
    `folder`: for files of unfinished episodes, such as those of their sandboxes.
    `any_version`: samples of other weights than the engines hold may be used (the pool judges their age).
    """

    def __init__(
        self,
        writer: Writer,
        settings: str,
        *,
        keeps: bool = True,
        any_version: bool = False,
        known: Mapping[Key, FinishedEntry] | None = None,
        episodes: Mapping[Key, FinishedEntry] | None = None,
        folder: Path | None = None,
    ):
        self._folder = folder
        self._writer, self.settings = writer, settings
        self._keeps, self._any_version = keeps, any_version
        self._known = dict(known or {})
        self._episodes = dict(episodes or {})  # unfinished, as their last recorded turns left them
        self._sessions: set[str | None] | None = None  # of these, once they are asked for
        self._rollout = 0  # that events belong to
        self._version: int | None = None  # of the engines when it began
        self._open: dict[int, Group] = {}  # groups handed out and not decided
        self._decided: list[int] = []  # since the last cut
        self._cut: dict[int, list[int]] = {}  # rollout -> groups decided in it, until its batch is kept
        self._kept: dict[int, Group] = {}  # since the last cut
        self._last_commits: list[int] = []

    def _note(self, event: Event, rollout: int | None = None, **columns: Any) -> None:
        self._writer.note(Note(time.time(), event, self._rollout if rollout is None else rollout, **columns))

    def _note_group(self, event: Event, group: tuple[int, int], value: str | None = None) -> None:
        """Report an event of a group, given by its index and attempt."""
        self._note(event, group_index=group[0], attempt=group[1], value=value)

    # -- groups

    def issued(self, groups: Sequence[Group], *, from_buffer: bool | None) -> None:
        """Report groups that are handed out. `from_buffer` None: by a user's source that keeps no journal."""
        source = {True: "buffer", False: "new", None: "own"}[from_buffer]
        for at, group in _numbered(groups):
            self._open[at[0]] = group
            self._note_group("issued", at, source)

    def returned(self, groups: Sequence[Group]) -> None:
        for at, _ in self._decide(groups):
            self._note_group("returned", at)

    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        for at, group in self._decide(groups):
            if outcome == "trained":
                self._kept[at[0]] = group
                indices = sorted({int(s.index) for s in flatten_samples(group) if s.index is not None})
                self._note_group("kept", at, json.dumps(indices))
            else:
                self._note_group("dropped", at, f"{outcome}: {reason}" if reason else outcome)

    def _decide(self, groups: Sequence[Group]) -> list[tuple[tuple[int, int], Group]]:
        """Return each group with its attempt and the index it was issued with; functions may change it."""
        found = _numbered(groups)
        if not all(at[0] in self._open for at, _ in found):
            issued = {s.index: known for known, group in self._open.items() for s in flatten_samples(group)}
            issued.pop(None, None)
            for place, ((index, attempt), group) in enumerate(found):
                if index not in self._open:
                    found[place] = (issued.get(first_sample(group).index, index), attempt), group
        for (index, _), _ in found:
            self._open.pop(index, None)
            self._decided.append(index)
        return found

    # -- samples

    def references(self) -> list[StoredArray]:
        """Return the stored arrays of all samples that can be recalled."""
        found = []
        for entry in self._known.values():
            with contextlib.suppress(ValueError, TypeError, LookupError):
                found += [a for fields in entry.load()[0] for a in references_in(from_fields(fields))]
        return found

    def recall(self, entry: Entry) -> Entry | None:
        """Return the entry as it was finished before the crash; None: it was not finished."""
        key = _key(entry)
        found = self._known.get(key) if key is not None else None
        if found is None or not self._fits(found):
            return None
        assert isinstance(entry, Sample)
        del self._known[key]  # type: ignore[arg-type]
        made = _load(entry, found)
        if made is not None:
            self._note("recalled", **_about(entry))
        return made

    def _fits(self, found: FinishedEntry) -> bool:
        return self._any_version or found.version == self._version

    # -- unfinished episodes: slime.rollout.episode_record

    @property
    def keeps(self) -> bool:
        return self._keeps

    def unfinished(self, origin: Sample) -> Sample | None:
        """Return the sample of an episode as its last recorded turn left it; None: it must start again."""
        found = self._episodes.get(_key(origin))  # type: ignore[arg-type]
        made = _load(origin, found) if found is not None and self._fits(found) else None
        return made if isinstance(made, Sample) else None

    def progressed(self, event: Event, origin: Sample, value: str, sample: Sample | None = None) -> None:
        """Report a call of an episode. `sample`: keep the episode as it is now."""
        keep, key = None, _key(origin)
        if sample is not None and key is not None:
            newest = newest_version([sample])
            version = self._version if newest is None else newest
            payload = _encode_samples([sample], is_fan_out=False)
            keep = KeepEpisode(key, origin.group_index, self.settings, version, payload)
            self._know_episode(keep)
        self._note(event, **_about(origin), value=value, also=keep)

    def _know_episode(self, keep: KeepEpisode) -> None:
        self._episodes.pop(keep.key, None)
        if keep.payload is not None:
            self._episodes[keep.key] = FinishedEntry(keep.version, keep.payload)

    def files_of(self, origin: Sample) -> Path:
        """Return the folder for files of an unfinished episode, which may not exist."""
        key = _key(origin)
        assert self._folder is not None and key is not None, "only a run has recorded episodes"
        return self._folder / "-".join(map(str, key))

    async def written(self) -> None:
        """Return when every event until now is on the disk, or was logged as missing."""
        await self._writer.written()

    def sessions_to_come(self) -> set[str | None]:
        """Return the session ids of the episodes that an earlier start has not finished."""
        if self._sessions is None:
            self._sessions = set()
            for entry in list(self._episodes.values()):
                with contextlib.suppress(ValueError, TypeError, LookupError):
                    self._sessions.add(entry.load()[0][0].get("session_id"))
        return self._sessions

    def episodes_of(self, group: Group) -> dict[Key, FinishedEntry]:
        """Return the unfinished episodes of a group, for the worker that continues them."""
        keys = [key for entry in group if (key := _key(entry)) is not None]
        return {key: self._episodes[key] for key in keys if key in self._episodes}

    def know_episodes(self, episodes: Mapping[Key, FinishedEntry]) -> None:
        self._episodes.update(episodes)

    def finished(self, origin: Entry, made: Entry) -> None:
        """Record that `origin` was generated, and scored unless rewards are computed for whole groups."""
        key = _key(origin)
        if key is None or is_finished(origin):
            return
        assert isinstance(origin, Sample), "only samples have a key"
        if self._episodes.pop(key, None) is not None and self._folder is not None:
            shutil.rmtree(self.files_of(origin), ignore_errors=True)
        samples = flatten_samples([made])
        is_whole = all(s.status in FINISHED and s.reward_failure is None for s in samples)
        is_scored = any(s.reward is not None or s.reward_failure is not None for s in samples)
        version = newest_version([*samples])
        note = Finished(
            time.time(),
            self._rollout,
            origin.group_index,
            self.settings,
            (*key, self._version if version is None else version),
            samples[-1].status.value,
            json.loads(_rewards(samples)) if is_scored else None,
            _encode_samples(samples, isinstance(made, list)) if self._keeps and is_whole else None,
        )
        self._writer.note(note)

    def scored(self, group: Group) -> None:
        """Record the rewards of a group whose samples were scored together."""
        for at, _ in _numbered([group]):
            self._note_group("scored", at, _rewards(flatten_samples(group)))

    # -- rollouts and steps

    def resumed(self, committed: int, last_made: int) -> None:
        """Record that the run resumes after step `committed` (-1: none), with rollouts up to `last_made`."""
        self._rollout = last_made + 1
        self._last_commits = [committed]
        self._note("resumed", committed, value=str(last_made), also=partial(forget_rollouts, ">", last_made))

    # -- rollout workers, whose events pass through here

    @property
    def version(self) -> int | None:
        """Return the weights that the engines held when the rollout began."""
        return self._version

    def for_worker(self) -> dict[str, Any]:
        """Return the arguments of a worker's ledger, which sends its events to this one."""
        own = {"keeps": self._keeps, "any_version": self._any_version, "folder": self._folder}
        return {"settings": self.settings, **own}

    def forward(self, note: AnyNote) -> None:
        """Report an event of a worker; it belongs to the current rollout of this process."""
        if isinstance(note, Finished):
            self._episodes.pop(note.key[:3], None)
        elif isinstance(note.also, KeepEpisode):
            self._know_episode(note.also)
        self._writer.note(note._replace(rollout=self._rollout))

    def restarted(self, group: Group, reason: str) -> None:
        """Report that a group starts again, because the worker that generated it has ended."""
        for at, _ in _numbered([group]):
            self._note_group("returned", at, reason)
            self._note_group("issued", at, "buffer")

    def begin(self, rollout_id: int, version: str | int | None) -> None:
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
        known = {sample.index for group in self._kept.values() for sample in flatten_samples(group)} - {None}
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            index = sample.group_index
            if index is not None and index not in self._kept and sample.index not in known:
                groups.setdefault(index, []).append(sample)
        for index, group in groups.items():
            if index not in self._open:
                self.issued([list(group)], from_buffer=None)
            self.consumed([list(group)], "trained")

    def made(self, rollout_id: int, value: Mapping[str, Any]) -> None:
        """Store a complete batch: a run that is killed later trains on this very batch."""
        keep = partial(keep_rollout, rollout_id, self.settings, dict(value)) if self._keeps else None
        done = [number for number in self._cut if number <= rollout_id]
        decided = [group for number in done for group in self._cut.pop(number)]
        self._note("made", rollout_id, also=ForgetEntries(decided, keep))

    def trained(self, rollout_id: int) -> None:
        self._note("consumed", rollout_id)

    def committed(self, rollout_id: int) -> None:
        """Drop what the previous checkpoint covers; keep what this one covers, in case it is damaged."""
        before = self._last_commits[-1] if self._last_commits else -1
        self._last_commits = [before, rollout_id]
        self._note("committed", rollout_id, also=partial(forget_rollouts, "<=", before))

    def evaluated(self, rollout_id: int) -> None:
        self._note("evaluated", rollout_id)


_current: Ledger | None = None


def use(ledger: Ledger | None) -> None:
    """Set the ledger that the rollout functions of this process report to."""
    global _current
    _current = ledger


def current() -> Ledger | None:
    return _current


def _numbered(groups: Sequence[Group]) -> list[tuple[tuple[int, int], Group]]:
    """Return index and attempt of each group that has an index, with the group."""
    found = []
    for group in groups:
        samples = flatten_samples([group])
        if samples and samples[0].group_index is not None:
            found.append(((samples[0].group_index, attempt_of(samples[0])), group))
    return found


def _key(entry: Entry) -> Key | None:
    """Return the key of a sample; None if it has no index or is not for training."""
    if isinstance(entry, list) or entry.index is None or entry.metadata.get(_GREEDY):
        return None
    return entry.index, attempt_of(entry), entry.response_length


def _about(sample: Sample) -> dict[str, Any]:
    return {
        "group_index": sample.group_index,
        "sample_index": sample.index,
        "attempt": attempt_of(sample),
    }


def _load(entry: Sample, found: FinishedEntry) -> Entry | None:
    """Return what was stored of an entry; None: it is damaged."""
    try:
        stored, is_fan_out = found.load()
        samples = [from_fields(fields) for fields in stored]
    except (ValueError, TypeError, LookupError) as error:
        logger.warning("%s is damaged in the ledger and will be generated again: %s", describe(entry), error)
        return None
    for sample in samples:
        if sample.multimodal_inputs is None:
            sample.multimodal_inputs = entry.multimodal_inputs  # of the prompt, as it was read again
    return samples if is_fan_out else samples[0]


def _encode_samples(samples: Sequence[Sample], is_fan_out: bool) -> bytes | None:
    """Encode samples for `Sample.from_dict`, without media."""
    stored = []
    for sample in samples:
        fields = {name: value for name, value in vars(sample).items() if name not in _NOT_STORED}
        own = {"spec_info": vars(sample.spec_info), "prefix_cache_info": vars(sample.prefix_cache_info)}
        stored.append({**fields, **own, "status": sample.status.value})
    return encode_or_skip({"fan_out": is_fan_out, "samples": stored}, f"sample {samples[0].index}")


def _rewards(samples: Sequence[Sample]) -> str:
    """Return the reward of a sample, or those of several, as JSON."""
    values = [s.reward if s.reward_failure is None else s.reward_failure.kind for s in samples]
    return json_text(values[0] if len(values) == 1 else values)
