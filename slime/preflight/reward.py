"""Tries the reward before the start, on a made-up response and on the label itself as the response.

A value that is not a score is an error. External causes (a judge that is down, a slow sandbox) are a warning
or a note, since such a reward may work in the run.
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
from slime.preflight.attacks import MADE_UP, NUM_ROWS, READ, attack
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

DEADLINE_S = 3.0  # for all calls of a user's function
WORKER_DEADLINE_S = 30.0  # for a built-in reward, whose process has packages to import first
# A reward that took less for one row is attacked before every run, for this long.
_QUICK_S, _ATTACK_S = 0.2, 1.0
# Errors that any response would cause; a KeyError may depend on the response.
_CERTAIN = (NameError, ImportError, TypeError, ArithmeticError)


class _Watched(PluginArgs):
    """Settings that record whether a fact of a run was read, such as the address of an engine."""

    def __getattribute__(self, name: str) -> Any:
        if name in _FACTS:
            object.__getattribute__(self, "__dict__")["asked"] = name
        return object.__getattribute__(self, name)


_FACTS = frozenset(PluginArgs.__annotations__) | {"num_rollout"}


def check_reward(args: Args) -> Iterator[Finding]:
    """Check that the reward returns a score, and that the right answer gets a better one than another."""
    own = _own_generation(args)
    sample = next(first_samples(args, 1), None) if _scores_responses(args) else None
    if sample is None:
        return
    if not (args.custom_rm_path or args.rm_type or sample.metadata.get("rm_type")):
        if not own:  # a user function may score its own samples
            text = "no reward is given: set --rm-type, --custom-rm-path or rm_type in the rows' metadata."
            yield Finding("error", "--rm-type", text)
    elif _can_be_tried(args, sample):
        with tempfile.TemporaryDirectory(prefix="slime-preflight-") as scratch:
            started = time.monotonic()
            found = list(_try(_Trial(args, scratch), sample))
        is_quick = time.monotonic() - started < _QUICK_S and args.custom_rm_path
        if is_quick and not own and not any(one.kind == "error" for one in found):
            found += attack_reward(args, _ATTACK_S)
        # The reward may need something that the user's generate function adds to a sample.
        yield from (replace(one, kind="warning") for one in found if one.kind == "error") if own else found


def attack_reward(args: Args, budget_s: float) -> Iterator[Finding]:
    """Warn of responses that earn the reward without a solution, on rows with different labels."""
    samples = list(first_samples(args, READ)) if _scores_responses(args) else []
    if not samples or (args.custom_rm_path and waits_for_group(args)) or not _can_be_tried(args, samples[0]):
        return
    by_label = {str(sample.label): sample for sample in samples}
    with tempfile.TemporaryDirectory(prefix="slime-preflight-") as scratch:
        trial = _Trial(args, scratch, budget_s)

        def score(row: Sample, response: str) -> float | None:
            tried = _answered(trial.args, row, response)
            return trial.value(tried) if trial.score([tried]) is None else None

        def right(row: Sample) -> str | None:
            return None if row.label in (None, "", []) else correct_response(trial.args, row)

        rows = list(by_label.values())[:NUM_ROWS]
        for text in attack(rows, list(by_label), score, right, budget_s):
            yield Finding("warning", trial.subject, text)


def _scores_responses(args: Args) -> bool:
    """Return whether slime's own rollouts compute rewards for the rows of --prompt-data."""
    generates = args.rollout_function_path in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)
    if args.env is not None and not (args.custom_rm_path or args.rm_type):
        return False  # the environment scores its episodes
    return generates and reads_prompts(args) and not args.multimodal_keys and not args.debug_train_only


def _own_generation(args: Args) -> bool:
    """Return whether a function of the user makes or changes samples, and perhaps scores them."""
    return not calls_engine_itself(args) or bool(args.rollout_sample_hook_path)


def _can_be_tried(args: Args, sample: Sample) -> bool:
    if args.custom_rm_path:
        return not args.custom_rm_path.startswith("slime.")  # those ask a teacher
    row = _row(args, sample)
    if row is None:
        return True  # the call reports an unknown name
    return not row.is_remote and (row.package is None or is_installed(row.package.replace("-", "_")))


def _row(args: Args | PluginArgs, sample: Sample) -> Reward | None:
    """Return the built-in reward of a sample; None: a user function scores it."""
    return None if args.custom_rm_path else find_reward(sample.metadata.get("rm_type") or args.rm_type)


class _Trial:
    """Calls the reward, with one deadline for all calls and a temporary folder."""

    def __init__(self, args: Args, scratch: str, deadline_s: float | None = None):
        given = plugin_args(args, RunInfo(run_id="preflight", run_dir=scratch))
        # No retries, and no failure ends the run.
        limits = {**args.limits, "reward-retries": 0, "reward-failures": 1 << 30}
        changes = {"limits": limits, "reward_failure_action": "drop"}
        self.args = _Watched(**vars(given) | changes)
        self.subject = "--custom-rm-path" if args.custom_rm_path else "--rm-type"
        usual = DEADLINE_S if args.custom_rm_path else WORKER_DEADLINE_S
        self._deadline = time.monotonic() + (deadline_s or usual)

    def score(self, samples: list[Sample]) -> Exception | None:
        """Score the samples in one call; return the error that ended it."""
        try:
            run(score_samples(self.args, samples), max(0.0, self._deadline - time.monotonic()))
        except (PluginError, RewardConfigError, TimeoutError) as error:
            return error
        finally:
            reset_breaker()
        return None

    def value(self, sample: Sample) -> float | None:
        value = None if sample.reward is None else sample.get_reward_value(self.args)
        return float(value) if isinstance(value, (int, float)) else None


def _try(trial: _Trial, sample: Sample) -> Iterator[Finding]:
    """Score a made-up response and the label, in one call if the reward scores whole groups.

    A custom reward also gets the label followed by the token that ends a response, as engines return it.
    """
    args, row = trial.args, _row(trial.args, sample)
    has_label = sample.label not in (None, "", [])
    answers = [MADE_UP, correct_response(args, sample) if has_label else "42"]
    if args.custom_rm_path and waits_for_group(args):
        answers = (answers + [MADE_UP] * args.n_samples_per_prompt)[: args.n_samples_per_prompt]
        tried = [_answered(args, sample, answer) for answer in answers]
        calls = [tried]
    else:
        end = load_tokenizer(args.hf_checkpoint).eos_token
        if args.custom_rm_path and has_label and end and not args.rollout_skip_special_tokens:
            answers.append(answers[1] + end)
        tried = [_answered(args, sample, answer) for answer in answers]
        calls = [[one] for one in tried]
    failures = [trial.score(call) for call in calls]
    unscored = next((one for one in tried if one.reward_failure is not None), None)
    if (any(failures) or unscored) and (asked := vars(args).get("asked")):
        text = f"it asks for args.{asked}, which only a run knows: it is first called by a rollout"
        yield Finding("note", trial.subject, text)
    elif any(failures):
        yield _failed(trial.subject, failures)
    elif unscored is not None and unscored.reward_failure is not None:
        text = f"it gave no score for {_short(unscored.response)}: {unscored.reward_failure.reason}"
        yield Finding("warning", trial.subject, text)
    elif has_label and (row is None or row.needs_label):
        yield from _compare(trial, tried)


def _failed(subject: str, failures: list[Exception | None]) -> Finding:
    """Report calls that raised or returned no score; an error if every response would fail like this."""
    errors = [error for error in failures if error is not None]
    if any(isinstance(error, TimeoutError) for error in errors):
        text = "it did not return in time, and was not tried again; --skip-preflight reward skips this"
        return Finding("warning", subject, text)
    wrong_values = [error for error in errors if error.__cause__ is None]
    certain = wrong_values or all(error is not None and _is_certain(error.__cause__) for error in failures)
    lines = str([*wrong_values, *errors][0]).removeprefix(subject).strip().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("  for ", "  Another try")))
    return Finding("error" if certain else "warning", subject, text)


def _is_certain(error: BaseException | None) -> bool:
    """Return whether every response would fail; a missing attribute of a match may be due to this one."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, Sample)
    return isinstance(error, _CERTAIN)


def correct_response(args: PluginArgs, sample: Sample) -> str:
    """Return the label as a response in which a built-in reward finds it; unchanged for a custom one."""
    label = str(sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label)
    row = _row(args, sample)
    if row is not None and (row.reads_box or (args.rm_type or "").startswith("boxed_")):
        boxed = label if "\\boxed" in label else f"\\boxed{{{label}}}"
        return f"</think> {boxed}"
    return f"Answer: {label}" if row is not None and row.reads_answer_line else label


def _answered(args: PluginArgs, sample: Sample, answer: str) -> Sample:
    """Return a copy of the sample with this response."""
    tried = copy.deepcopy(sample)
    tried.index = tried.group_index = 0
    tried.response, tried.status = answer, Sample.Status.COMPLETED
    tokenizer = load_tokenizer(args.hf_checkpoint)
    prompt = tried.prompt if isinstance(tried.prompt, str) else ""
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    tried.tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *tokens]
    tried.response_length, tried.rollout_log_probs = len(tokens), [0.0] * len(tokens)
    return tried


def _compare(trial: _Trial, tried: list[Sample]) -> Iterator[Finding]:
    """Report the scores of the made-up response, the label, and the label with its end token."""
    low, high, *rest = (trial.value(sample) for sample in tried)
    if low is None or high is None:
        return
    shown = f"{high:g} for {_short(tried[1].response)}"
    both = f"it gives {shown}, the label of the first row, and {low:g} for {MADE_UP!r}"
    if high > low:
        yield Finding("note", trial.subject, both)
    else:
        text = f"{both}: does the right answer score well? Check the reward and the labels."
        yield Finding("warning", trial.subject, text)
    has_end = len(tried) == 3 and tried[2].response.startswith(tried[1].response)
    if has_end and rest[0] is not None and rest[0] < high:
        text = (
            f"it gives {shown} and {rest[0]:g} for {_short(tried[2].response)}, which is how responses end: "
            "compare slime.rollout.rm_hub.response_text(args, sample), or set --rollout-skip-special-tokens"
        )
        yield Finding("warning", trial.subject, text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
