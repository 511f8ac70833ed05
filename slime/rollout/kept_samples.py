"""What a finished sample is made again from after a crash: its fields, as they were when it was finished."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slime.record.ledger_rows import Columns
from slime.rollout.prompt_groups import FINISHED
from slime.utils.reward_failure import RewardFailure
from slime.utils.types import Sample, SampleStatus

_FEW_TOKENS = 100
_NOT_KEPT = frozenset({"multimodal_inputs", "trace"})
_UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})
_encode = json.JSONEncoder(default=str).encode  # `json.dumps` makes one for each call
# The fields of a sample by what they hold: of most samples, most are as in a new one.
_NEW = vars(Sample())
_FIELDS = _NEW.keys()
_NUM_FIELDS = len(_FIELDS)
_OF_NUMBERS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
_COUNTS = {name: vars(_NEW[name]) for name in ("spec_info", "prefix_cache_info")}
_APART = {*_OF_NUMBERS, *_COUNTS, *_NOT_KEPT, "status", "version_spans"}
_CONTAINERS = {n: v for n, v in _NEW.items() if isinstance(v, (list, dict)) and n not in _APART}
_PLAIN = tuple(name for name in _NEW if name not in _APART and name not in _CONTAINERS)
_PLAIN_NEW = tuple(_NEW[name] for name in _PLAIN)
_plain_values = operator.itemgetter(*_PLAIN)


class Seen(NamedTuple):
    """What slime may give a finished sample anew, and what tells whether samples are alike; each of all."""

    indices: tuple[int | None, ...]
    groups: tuple[int | None, ...]
    statuses: tuple[SampleStatus, ...]
    rewards: tuple[Any, ...]
    failures: tuple[RewardFailure | None, ...]
    tokens: tuple[list[int], ...]
    loss_masks: tuple[list[int] | None, ...]
    removed: tuple[bool, ...]
    metadata: tuple[dict[str, Any], ...]  # empty
    paths: tuple[str | None, ...]

    def fields_of(self, several: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The fields of each, as they were when these were seen."""
        rows = zip(*self, strict=True)
        return [
            {**fields, **dict(zip(_SEEN, row, strict=True)), "metadata": {}}
            for fields, row in zip(several, rows, strict=True)
        ]


_SEEN = (
    "index", "group_index", "status", "reward", "reward_failure", "tokens", "loss_mask", "remove_sample",
    "metadata", "generate_function_path",
)  # fmt: skip
_seen_of = operator.itemgetter(*_SEEN)


def look_at(several: Sequence[dict[str, Any]]) -> Seen | None:
    """What is noted of finished samples, by their fields, where no copy of each is needed; None: it is.

    Slime adds to the metadata, and gives the fields of `Seen` new values; of the others it changes none.
    """
    seen = Seen(*zip(*map(_seen_of, several), strict=True)) if several else None
    if seen is None or any(seen.metadata) or any(seen.paths) or _changes(seen.rewards):
        return None
    return seen


def is_whole(fields: dict[str, Any]) -> bool:
    """Whether all of a sample is there: it came to its end, and its reward did not fail."""
    return fields["status"] in FINISHED and fields["reward_failure"] is None


class Alike(NamedTuple):
    """Of samples of one group that ended in one way: no metadata, nothing that failed, none `is_alone`."""

    indices: list[int]
    group_index: int | None
    status: str
    rewards: tuple[Any, ...]


def find_alike(seen: Seen, several: Sequence[dict[str, Any]]) -> Alike | None:
    """What nearly all samples are that end together; None: they are looked at singly."""
    groups, statuses = seen.groups, seen.statuses
    indices = [index for index in seen.indices if index is not None]
    if (
        groups.count(groups[0]) == statuses.count(statuses[0]) == len(indices) == len(several)
        and not any(seen.failures)
        and max(map(len, seen.tokens)) <= _FEW_TOKENS
        and not _have_more(several)
    ):
        return Alike(indices, groups[0], statuses[0]._value_, seen.rewards)
    return None


def is_alone(fields: dict[str, Any]) -> bool:
    """Whether it is kept in a piece of its own: it is large, or something was attached to it."""
    return len(fields["tokens"]) > _FEW_TOKENS or _has_more(fields)


def _has_more(fields: dict[str, Any]) -> bool:
    """Whether something was attached to the sample, beside its trace, which nearly all have."""
    return len(fields) > _NUM_FIELDS and len(fields) > _NUM_FIELDS + ("trace" in fields)


def _have_more(several: Sequence[dict[str, Any]]) -> bool:
    """The same of any of some samples, of which all may be traced, or none."""
    most = max(map(len, several))
    return most > _NUM_FIELDS + (most > _NUM_FIELDS and all(["trace" in fields for fields in several]))


def as_they_are(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """The fields of each, where nobody but slime has samples in hand that are finished.

    Slime gives fields new values and adds to the metadata; no list of numbers is changed in place, and those
    are not copied here.
    """
    several = [sample.__dict__.copy() for sample in samples]
    none: dict[str, Any] = {}
    for fields in several:
        fields["metadata"] = _own_metadata(metadata) if (metadata := fields["metadata"]) else none
    if not _UNCHANGING.issuperset([type(fields["reward"]) for fields in several]):
        for fields in several:
            fields["reward"] = _own(fields["reward"])
    return several


def _own_metadata(metadata: Any) -> Any:
    flat = type(metadata) is dict and _UNCHANGING.issuperset(map(type, metadata.values()))
    return metadata.copy() if flat else _own(metadata)


def columns_of(several: Sequence[dict[str, Any]]) -> Columns:
    """All that samples are made again from, in containers of its own, by the fields of each.

    No media, no times of work, nothing that all new samples have. Several samples have the same names.
    """
    columns: Columns = {}
    plain = zip(*map(_plain_values, several), strict=True)
    for name, new, of_all in zip(_PLAIN, _PLAIN_NEW, plain, strict=True):
        if not all(map(operator.is_, of_all, itertools.repeat(new))):
            columns[name] = list(map(_own, of_all)) if _changes(of_all) else list(of_all)
    for name in _OF_NUMBERS:
        values = [fields[name] for fields in several]
        if set(map(type, values)) != {type(None)}:
            columns[name] = [value[:] if type(value) is list else _own(value) for value in values]
    for name, new in _CONTAINERS.items():
        values = [fields[name] for fields in several]
        if set(map(type, values)) != {type(new)} or any(values):
            columns[name] = [value.copy() if _is_flat(value) else _own(value) for value in values]
    for name, counts in _COUNTS.items():
        values = [fields[name].__dict__ for fields in several]
        if values.count(counts) < len(values):
            columns[name] = [value.copy() for value in values]
    columns["status"] = [fields["status"]._value_ for fields in several]
    columns["version_spans"] = [_spans_text(tuple(fields["version_spans"])) for fields in several]
    if _has_more(several[0]):
        for name in several[0].keys() - _FIELDS - _NOT_KEPT:  # attached later
            columns[name] = [_own(fields[name]) for fields in several]
    return columns


@functools.lru_cache(maxsize=1024)
def _spans_text(spans: tuple[tuple[str, int, int], ...]) -> str:
    """Most samples of a rollout have the same."""
    return _encode(spans)


def from_kept(fields: dict[str, Any]) -> Sample:
    """Inverse of one row of those columns."""
    spans = fields["version_spans"]
    return Sample.from_dict({**fields, "version_spans": json.loads(spans) if spans else []})


def _changes(values: Iterable[Any]) -> bool:
    """Whether somebody might change one of them."""
    return not _UNCHANGING.issuperset(map(type, values))


def _is_flat(value: Any) -> bool:
    """Whether it is a list or a dict of what nobody changes, as the versions of weights are."""
    kind = type(value)
    return (kind is list or kind is dict) and not _changes(value if kind is list else value.values())


def _own(value: Any) -> Any:
    """The same value, which nobody else changes; what no file can hold stays as it is."""
    try:
        return _copied(value)
    except RecursionError:  # it holds itself
        return value


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list or kind is tuple or kind is set:
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if kind.__module__ == "torch" and hasattr(value, "detach") else value
