"""Checks what a user's generate function returned."""

import math
import operator
from typing import Any, NoReturn

from slime.rollout.prompt_groups import Entry, describe, describe_fully, without_response
from slime.utils.errors import EpisodeEnded
from slime.utils.plugin_errors import wrong_return
from slime.utils.reward_failure import infra_error
from slime.utils.types import Sample
from slime.wire.protocol import wrong_token_id

CUSTOM_GENERATE = "--custom-generate-function-path"
_LISTS = ("tokens", "loss_mask", "rollout_log_probs")


def check_returned(path: str, source: Sample, result: Any, vocab_size: int | None = None) -> Entry:
    """Return the checked sample, or the samples of a fan-out; anything else raises, with the function's name.

    `vocab_size` None: not known.
    """
    if not isinstance(result, list):
        return _check_sample(path, source, result, vocab_size)
    if not result:
        _refuse(path, source, "returned no sample; return at least one.")
    for sample in result:
        _check_sample(path, source, sample, vocab_size, is_sibling=True)
    if len(set(map(id, result))) < len(result):
        _refuse(path, source, "returned one Sample several times; return copies of it.")
    # Siblings share one group and one rollout_id: their own, or else the index of their source.
    if all(sample.rollout_id is None for sample in result):
        for sample in result:
            sample.rollout_id = source.index
    ids = [sample.rollout_id for sample in result]
    if len(set(ids)) != 1:
        complaint = f"returned samples with rollout ids {ids}; siblings of one execution must share one."
        _refuse(path, source, complaint)
    return result


def _refuse(path: str, source: Sample, complaint: str) -> NoReturn:
    wrong_return(CUSTOM_GENERATE, path, complaint, describe_fully(source))


def without_a_score(path: str, source: Sample, ended: EpisodeEnded) -> Sample:
    """Return a sample with a failed reward for an episode whose function let EpisodeEnded escape."""
    sample = without_response(source)
    sample.status, sample.session_id = Sample.Status.COMPLETED, source.session_id
    sample.reward_failure = infra_error(
        f"{CUSTOM_GENERATE} {path} let {type(ended).__name__} escape ({ended}); catch SessionError of "
        "slime.agent.session and return session.samples(...), which trains the turns that it has"
    )
    return sample


def _check_sample(
    path: str, source: Sample, result: Any, vocab_size: int | None, *, is_sibling: bool = False
) -> Sample:
    """Check one returned sample. `is_sibling`: it is one of a fan-out, and may have an index of its own."""
    if not isinstance(result, Sample):
        _refuse(path, source, f"returned {type(result).__name__}; return a Sample or a list of them.")
    if not isinstance(result.status, Sample.Status):  # its name, as in a sample that was read from JSON
        names = [status.value for status in Sample.Status]
        if result.status not in names:
            complaint = f"returned a sample with status {result.status!r}; use Sample.Status: "
            _refuse(path, source, f"{complaint}{', '.join(names)}.")
        result.status = Sample.Status(result.status)
    if not isinstance(result.reward, (int, float, dict, type(None))):  # an array or tensor with one number
        try:
            result.reward = float(result.reward.item())
        except (AttributeError, TypeError, ValueError, RuntimeError):
            complaint = (
                f"returned a sample whose reward is {result.reward!r:.80}; give it a number, or a dict"
            )
            _refuse(path, source, f"{complaint} with one.")
    for name in _LISTS:
        values = getattr(result, name)
        if values is not None and type(values) is not list:  # an array, a tensor, a tuple
            setattr(result, name, values.tolist() if hasattr(values, "tolist") else list(values))
    result.tokens = [_whole(token) for token in result.tokens]
    result.metadata = {} if result.metadata is None else result.metadata
    result.response = "" if result.response is None else result.response
    if wrong := _wrong_with(result, vocab_size):
        _refuse(path, source, f"returned a sample {wrong}")
    keep_identity(result, source)
    if wrong := wrong_identity(result, source, is_sibling=is_sibling):
        _refuse(path, source, wrong)
    result.version_spans = [(version, begin, end) for version, begin, end in result.version_spans]
    return result


def keep_identity(result: Sample, source: Sample) -> None:
    """Give a new Sample the index and group index of its source, which the ledger reads."""
    for name in ("index", "group_index"):
        value = getattr(result, name)
        setattr(result, name, getattr(source, name) if value is None else _whole(value))


def wrong_identity(result: Sample, source: Sample, *, is_sibling: bool = False) -> str | None:
    """Return a complaint if `result` is another sample than `source`; None: it is this one.

    A data source may give out samples without numbers, which then cannot be compared. Siblings of a fan-out
    may have indices of their own, since many functions number the turns of an episode.
    """
    same_group = source.group_index is None or result.group_index == source.group_index
    same_sample = is_sibling or source.index is None or result.index == source.index
    if same_group and same_sample:
        return None
    return (
        f"returned {describe(result)} for {describe(source)}, which would train one sample twice and lose "
        "the other; return the sample that it was called with, or a new Sample without index and group_index."
    )


def _wrong_with(sample: Sample, vocab_size: int | None) -> str | None:
    """Return a complaint about values that would fail later, in a trainer or in the record."""
    if not isinstance(sample.response, str):
        return f"whose response is {sample.response!r:.80}; it is the text of the answer."
    if (wrong := wrong_token_id(sample.tokens, vocab_size)) is not None:
        known = "" if vocab_size is None else f", which has {vocab_size} ids"
        return f"with the token id {wrong}; tokens are whole numbers of the model's vocabulary{known}."
    odd = [value for value in sample.rollout_log_probs or () if not _is_finite(value)]
    if odd:
        return f"with the log-prob {odd[0]!r:.80}; rollout_log_probs holds a finite number for each token."
    return None


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)  # also of numpy's and torch's numbers
    except (TypeError, ValueError, OverflowError):
        return False


def _whole(value: Any) -> Any:
    """Convert an integer of numpy or torch to a Python int; return anything else unchanged."""
    try:
        return operator.index(value)
    except TypeError:
        return value
