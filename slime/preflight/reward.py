"""The reward, tried before anything starts: on a made-up answer, and on the label itself as the answer.

A value that is no score is an error. What depends on the world (a judge that is down, a slow sandbox) is a
warning or a note, since such a reward may work in the run.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slime.arguments import Args, PluginArgs, RunInfo, plugin_args
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.rewards import Reward, find_reward
from slime.preflight.findings import Finding
from slime.preflight.packages import is_installed
from slime.preflight.prompts import first_samples, reads_prompts
from slime.rollout.prompt_formats import calls_engine_itself
from slime.rollout.rm_hub.hub import waits_for_group
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.rollout.rm_hub.scoring import reset_breaker, score_samples
from slime.utils.async_utils import run
from slime.utils.plugin_errors import PluginError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

MADE_UP = "I do not know."
DEADLINE_S = 3.0  # for all calls of a function of the user's
WORKER_DEADLINE_S = 30.0  # for a built-in reward, whose process has packages to import first
# Mistakes that no other answer would avoid; a KeyError may come from what an answer holds.
_CERTAIN = (NameError, ImportError, TypeError, ArithmeticError)


class _Watched(PluginArgs):
    """Settings that note whether anything was asked that only a run knows, such as an engine's address."""

    def __getattribute__(self, name: str) -> Any:
        if name in _FACTS:
            object.__getattribute__(self, "__dict__")["asked"] = name
        return object.__getattribute__(self, name)


_FACTS = frozenset(PluginArgs.__annotations__) | {"num_rollout"}


def check_reward(args: Args) -> Iterator[Finding]:
    """Whether it returns a score at all, and whether the right answer gets a better one than another."""
    own = _own_generation(args)
    sample = next(first_samples(args, 1), None) if _scores_answers(args) else None
    if sample is None:
        return
    if not (args.custom_rm_path or args.rm_type or sample.metadata.get("rm_type")):
        if not own:  # a function of the user's may score what it makes
            text = "no reward is given: set --rm-type, --custom-rm-path or rm_type in the rows' metadata."
            yield Finding("error", "--rm-type", text)
    elif _can_be_tried(args, sample):
        with tempfile.TemporaryDirectory(prefix="slime-preflight-") as scratch:
            found = list(_try(_Trial(args, scratch), sample))
        # A reward may read what a function of the user's leaves in a sample; a made-up one has none of it.
        yield from (replace(one, kind="warning") for one in found if one.kind == "error") if own else found


def _scores_answers(args: Args) -> bool:
    """Whether rollouts of our own code have rewards computed for the rows of --prompt-data."""
    generates = args.rollout_function_path in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)
    if args.env is not None and not (args.custom_rm_path or args.rm_type):
        return False  # the environment scores its episodes
    return generates and reads_prompts(args) and not args.multimodal_keys and not args.debug_train_only


def _own_generation(args: Args) -> bool:
    """Whether a function of the user's makes or changes samples, and perhaps scores them."""
    return not calls_engine_itself(args) or bool(args.rollout_sample_hook_path)


def _can_be_tried(args: Args, sample: Sample) -> bool:
    if args.custom_rm_path:
        return not args.custom_rm_path.startswith("slime.")  # those ask a teacher
    row = _row(args, sample)
    if row is None:
        return True  # and it will be told that there is none of that name
    return not row.is_remote and (row.package is None or is_installed(row.package.replace("-", "_")))


def _row(args: Args | PluginArgs, sample: Sample) -> Reward | None:
    """The built-in reward of a sample; None: a function of the user's scores it."""
    return None if args.custom_rm_path else find_reward(sample.metadata.get("rm_type") or args.rm_type)


class _Trial:
    """Calls of the reward, with one deadline for all of them and a folder that is thrown away."""

    def __init__(self, args: Args, scratch: str):
        given = plugin_args(args, RunInfo(run_id="preflight", run_dir=scratch))
        # One call is one call: no retries, and no failure ends anything.
        limits = {**args.limits, "reward-retries": 0, "reward-failures": 1 << 30}
        changes = {"limits": limits, "reward_failure_action": "drop"}
        self.args = _Watched(**vars(given) | changes)
        self.subject = "--custom-rm-path" if args.custom_rm_path else "--rm-type"
        self._deadline = time.monotonic() + (DEADLINE_S if args.custom_rm_path else WORKER_DEADLINE_S)

    def needs_run(self) -> Finding | None:
        """A note if the reward asked for a fact that only a run knows."""
        asked = vars(self.args).get("asked")
        text = f"it asks for args.{asked}, which only a run knows: it is first called by a rollout"
        return Finding("note", self.subject, text) if asked else None

    def score(self, samples: list[Sample]) -> None:
        try:
            run(score_samples(self.args, samples), max(0.0, self._deadline - time.monotonic()))
        finally:
            reset_breaker()


def _try(trial: _Trial, sample: Sample) -> Iterator[Finding]:
    """Scores a made-up answer and the label; in one group where groups are scored."""
    has_label = sample.label not in (None, "", [])
    answers = [MADE_UP, right_answer(trial.args, sample) if has_label else "42"]
    tried = [_answered(trial.args, sample, answer) for answer in answers]
    if trial.args.custom_rm_path and waits_for_group(trial.args):
        rest = range(trial.args.n_samples_per_prompt - 2)
        group = [*tried, *(_answered(trial.args, sample, MADE_UP) for _ in rest)]
        calls = [group[: trial.args.n_samples_per_prompt]]
    else:
        calls = [[one] for one in tried]
    failures = [_failure(trial, call) for call in calls]
    if any(failures):
        yield _told(trial, failures)
        return
    for one in tried:
        if one.reward_failure is not None:
            text = f"it gave no score for {_short(one.response)}: {one.reward_failure.reason}"
            yield trial.needs_run() or Finding("warning", trial.subject, text)
            return
    row = _row(trial.args, sample)
    if has_label and (row is None or row.needs_label) and tried[1].reward is not None:
        yield from _compare(trial, *tried)
        yield from _check_ending(trial, sample, tried[1])


def _failure(trial: _Trial, samples: list[Sample]) -> Exception | None:
    try:
        trial.score(samples)
    except (PluginError, RewardConfigError, TimeoutError) as error:
        return error
    return None


def _told(trial: _Trial, failures: list[Exception | None]) -> Finding:
    """What is said of calls that ended without an answer or with a wrong one."""
    if (note := trial.needs_run()) is not None:
        return note
    errors = [error for error in failures if error is not None]
    if any(isinstance(error, TimeoutError) for error in errors):
        text = "it did not answer in time, and was not tried further; --skip-preflight reward leaves it alone"
        return Finding("warning", trial.subject, text)
    wrong_value = next(filter(_is_wrong_value, errors), None)
    same = len({type(error and error.__cause__) for error in failures}) == 1
    certain = wrong_value is not None or (same and _is_certain(errors[0].__cause__))
    lines = str(wrong_value or errors[0]).removeprefix(trial.subject).strip().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("  for ", "  Another try")))
    return Finding("error" if certain else "warning", trial.subject, text)


def _is_wrong_value(error: Exception) -> bool:
    return error.__cause__ is None and not isinstance(error, TimeoutError)


def _is_certain(error: BaseException | None) -> bool:
    """No answer gives a sample an attribute that it lacks; one of a match may lack for this answer only."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, Sample)
    return isinstance(error, _CERTAIN)


def right_answer(args: PluginArgs, sample: Sample) -> str:
    """The label in the form that a built-in reward looks for; a custom one gets it as it is."""
    label = str(sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label)
    row = _row(args, sample)
    if row is not None and (row.reads_box or (args.rm_type or "").startswith("boxed_")):
        boxed = label if "\\boxed" in label else f"\\boxed{{{label}}}"
        return f"</think> {boxed}"
    return f"Answer: {label}" if row is not None and row.reads_answer_line else label


def _answered(args: PluginArgs, sample: Sample, answer: str) -> Sample:
    """The sample as if the model had given this answer."""
    tried = copy.deepcopy(sample)
    tried.index = tried.group_index = 0
    tried.response, tried.status = answer, Sample.Status.COMPLETED
    tokenizer = load_tokenizer(args.hf_checkpoint)
    prompt = tried.prompt if isinstance(tried.prompt, str) else ""
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    tried.tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *tokens]
    tried.response_length, tried.rollout_log_probs = len(tokens), [0.0] * len(tokens)
    return tried


def _compare(trial: _Trial, made_up: Sample, right: Sample) -> Iterator[Finding]:
    low, high = (_number(sample.get_reward_value(trial.args)) for sample in (made_up, right))
    if low is None or high is None:
        return
    shown = f"{high:g} for {_short(right.response)}, the label of the first row, and {low:g} for {MADE_UP!r}"
    if high > low:
        yield Finding("note", trial.subject, f"it gives {shown}")
    else:
        text = f"it gives {shown}: does the right answer score well? Look at the reward and the labels."
        yield Finding("warning", trial.subject, text)


def _check_ending(trial: _Trial, sample: Sample, right: Sample) -> Iterator[Finding]:
    """Whether the right answer is still right with the token that ends it, as engines give it."""
    args = trial.args
    end = load_tokenizer(args.hf_checkpoint).eos_token
    ours = not args.custom_rm_path or waits_for_group(args)
    if not end or ours or args.rollout_skip_special_tokens:
        return
    ended = _answered(args, sample, right.response + end)
    if _failure(trial, [ended]) is not None or ended.reward is None:
        return
    before, after = (_number(one.get_reward_value(args)) for one in (right, ended))
    if before is not None and after is not None and after < before:
        text = (
            f"it gives {before:g} for {_short(right.response)} and {after:g} for {_short(ended.response)}, "
            "which is how answers end: compare slime.rollout.rm_hub.answer_text(args, sample), or set "
            "--rollout-skip-special-tokens"
        )
        yield Finding("warning", trial.subject, text)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
