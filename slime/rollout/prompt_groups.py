"""Helpers for prompt groups: queries, descriptions for messages, and copies.

A group is a list with one entry per execution of its prompt: a Sample or, when a generate function fanned
out, the list of samples that execution made. `flatten_samples` of slime.utils.types gives its samples.
"""

import copy
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from slime.utils.packed_samples import PACKED, fields_with_references, from_fields
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

T = TypeVar("T")
Entry: TypeAlias = Sample | list[Sample]
Group: TypeAlias = list[Entry]
Outcome = Literal["trained", "filtered", "failed"]  # of a group

_IMMUTABLE = frozenset({type(None), bool, int, float, str})
_CONTAINERS = (list, dict, tuple)
_MEDIA = ("multimodal_inputs", "multimodal_train_inputs")
FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
_EXCERPT = 80  # characters of either end
# In Sample.metadata: how often this sample was discarded and generated again.
ATTEMPT_KEY = "attempt"


def first_sample(group: Group) -> Sample:
    return flatten_samples(group)[0]


def index_of(sample: Sample) -> int:
    """Return the sample's number within the run; 0 if the data source gave none."""
    return sample.index or 0


def describe(group: Group | Sample) -> str:
    """Name a group or sample in messages."""
    sample = group if isinstance(group, Sample) else first_sample(group)
    return f"sample {sample.index} (group {sample.group_index})"


def describe_fully(samples: Sample | Sequence[Sample]) -> str:
    """Name samples in messages, with excerpts of prompt and response."""
    if not isinstance(samples, Sample):
        return f"{len(samples)} samples, the first: {describe_fully(samples[0])}" if samples else "no samples"
    prompt = samples.prompt if isinstance(samples.prompt, str) else str(samples.prompt)
    text = f"{describe(samples)}, prompt {_excerpt(prompt)}"
    return f"{text}, response {_excerpt(samples.response)}" if samples.response else text


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 2 * _EXCERPT else f"{text[:_EXCERPT]} ... {text[-_EXCERPT:]}")


def is_finished(entry: Entry | Group) -> bool:
    """Return whether generation is over for every sample of the entry or group."""
    return all(sample.status in FINISHED for sample in flatten_samples([entry]))


def is_scored(group: Group) -> bool:
    """Return whether every sample is finished and has its reward, so the group could be trained."""
    return is_finished(group) and all(s.reward is not None for s in flatten_samples(group))


def check_groups(groups: Any) -> list[Group]:
    """Check the groups of a user's data source; raise ValueError for anything but lists of samples.

    Indices of numpy become ints, because seeds are computed from them.
    """
    wanted = "return a list of groups, each a list of slime.utils.types.Sample that share their prompt"
    if not isinstance(groups, Iterable) or isinstance(groups, (str, Mapping)):
        raise ValueError(f"get_samples returned {type(groups).__name__}; {wanted}.")
    found: list[Group] = []
    for number, group in enumerate(groups):
        is_list = isinstance(group, (list, tuple))
        entries = group if isinstance(group, list) else list(group) if is_list else [group]
        samples = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
        if not is_list or not samples or not all(isinstance(sample, Sample) for sample in samples):
            what = f"a list of {type(samples[0]).__name__}" if is_list and samples else type(group).__name__
            raise ValueError(f"group {number} of get_samples is {what if samples else 'empty'}; {wanted}.")
        for sample in samples:
            sample.index, sample.group_index = _whole(sample, "index"), _whole(sample, "group_index")
            sample.metadata = {} if sample.metadata is None else sample.metadata
        found.append(entries)
    return found


def _whole(sample: Sample, name: str) -> int | None:
    value = getattr(sample, name)
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        complaint = f"get_samples gave a sample with {name} {value!r}; give it a whole number."
        raise ValueError(complaint) from None


def attempt_of(sample: Sample) -> int:
    return int(sample.metadata.get(ATTEMPT_KEY, 0))


def copy_sample(sample: Sample) -> Sample:
    """Return an independent copy; media are shared, since nothing writes to them."""
    new = _bare_copy(sample)
    for name, value in vars(sample).items():  # every sample is copied several times, so this loop is short
        if type(value) not in _IMMUTABLE and isinstance(value, (list, dict)) and name not in _MEDIA:
            vars(new)[name] = _copy_container(value)
    new.spec_info = _bare_copy(sample.spec_info)
    new.prefix_cache_info = _bare_copy(sample.prefix_cache_info)
    return new


def _bare_copy(value: T) -> T:
    """Copy a plain object faster than `copy.copy` does."""
    new = object.__new__(type(value))
    vars(new).update(vars(value))
    return new


def _copy_container(value: list[Any] | dict[Any, Any]) -> Any:
    """Copy a list or dict, nested ones deeply. Lists are uniform: the first item shows whether they nest."""
    if not value:
        return value.copy()
    if isinstance(value, list):
        nested = isinstance(value[0], _CONTAINERS)
    else:
        nested = any(isinstance(item, _CONTAINERS) for item in value.values())
    return copy.deepcopy(value) if nested else value.copy()


def copy_group(group: Group) -> Group:
    return [[copy_sample(s) for s in e] if isinstance(e, list) else copy_sample(e) for e in group]


def without_response(sample: Sample) -> Sample:
    """Return a copy that starts from the prompt."""
    new = copy_sample(sample)
    if new.response_length:
        new.tokens = new.tokens[: -new.response_length]
    new.response, new.response_length, new.reward = "", 0, None
    new.loss_mask = new.rollout_log_probs = new.turn_rewards = None
    new.rollout_top_p_token_ids = new.rollout_top_p_token_offsets = new.rollout_routed_experts = None
    new.teacher_log_probs = new.teacher_top_ids = new.teacher_top_log_probs = None
    new.version_spans, new.weight_versions = [], []
    new.status, new.session_id = Sample.Status.PENDING, None
    _drop_later_images(new)
    return new


def mask_earlier_tokens(sample: Entry) -> None:
    """Exclude the tokens that the sample has so far from training."""
    for one in flatten_samples([sample]):
        if one.response_length > 0:
            one.loss_mask = [0] * one.response_length


def _drop_later_images(sample: Sample) -> None:
    """Drop images of observations; images of the prompt are encoded again."""
    spans = sample.image_spans or []
    kept = [span for span in spans if span[1] <= len(sample.tokens)]
    if len(kept) < len(spans):
        shown = sample.multimodal_inputs or {}
        images = list(shown.get("images") or ())[: len(kept)]
        sample.multimodal_inputs = {**shown, "images": images} if images else None
        sample.tokens, sample.image_spans = [], None
        sample.multimodal_train_inputs = sample.multimodal_train_input_id = None


def next_attempt(group: Group) -> Group:
    """Count another attempt of the samples, which changes their seeds."""
    for sample in flatten_samples(group):
        sample.metadata[ATTEMPT_KEY] = attempt_of(sample) + 1
    return group


def group_to_plain(group: Group) -> list[Any]:
    """Return nested lists of `Sample.to_dict()` without traces, independent of the live samples."""
    return [[_to_plain(s) for s in entry] if isinstance(entry, list) else _to_plain(entry) for entry in group]


def _to_plain(sample: Sample) -> dict[str, Any]:
    bare = copy.copy(sample)
    vars(bare).pop("trace", None)  # larger than the rest of a short sample
    return fields_with_references(copy_sample(bare))


def group_from_plain(plain: list[Any]) -> Group:
    return [[_from_plain(s) for s in e] if isinstance(e, list) else _from_plain(e) for e in plain]


def _from_plain(fields: dict[str, Any]) -> Sample:
    try:
        return from_fields(fields)
    except LookupError as error:
        sample = from_fields({**fields, PACKED: {}})
        logger.warning("%s starts again from its prompt: %s", describe(sample), error)
        return without_response(sample)
