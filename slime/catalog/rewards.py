"""Built-in rewards: the rows of `--rm-type`."""

from dataclasses import dataclass
from typing import Any, Literal

_HUB = "slime.rollout.rm_hub"
BOXED = "boxed_"  # before any name: only the content of the last \boxed{...} is scored


@dataclass(frozen=True, slots=True)
class Reward:
    """One way to score a response.

    With `in_worker`, `function` reads text of a model, so it runs in a worker process with a deadline. It
    gets (response, label) and the `metadata` entries that it reads, and returns a score. Otherwise it is
    awaited in the rollout process with (args, sample, response=...).
    """

    function: str
    help: str
    in_worker: bool = True
    wrong: Any = 0  # the score of a response that is too large to be compared
    needs_label: bool = True
    empty_label: bool = False  # "" is a label, too
    # What a label may be: "one" answer (passed as text), "several" accepted answers, or "any" value.
    label: Literal["one", "several", "any"] = "any"
    label_entry: str | None = None  # entry of Sample.metadata that replaces a missing label
    metadata: tuple[str, ...] = ()  # entries of Sample.metadata that the function gets, as a dict
    reads_box: bool = False  # reads only the last \boxed{...}, with or without the prefix
    reads_answer_line: bool = False  # reads "Answer: ..."; the content of a box is passed in that form
    # A judge at --rm-url, which retries on its own and may give another score next time.
    is_remote: bool = False
    needs_rm_url: bool = False
    runs_programs: bool = False  # of the model, in the --sandbox
    asks_judge: bool = False  # a model scores the response: the --judge flags
    package: str | None = None  # that has to be installed
    extra: str | None = None  # the extra of slime-rl that installs it


REWARDS: dict[str, Reward] = {
    "math": Reward(
        f"{_HUB}.math_check.check_math",
        "the last \\boxed{...} equals the label, by math-verify",
        label="one",
        reads_box=True,
        package="math-verify",
        extra="math",
    ),
    "dapo": Reward(
        f"{_HUB}.math_dapo_utils.compute_score",
        'the text after "Answer:" equals the label, as a dict whose score is 1 or -1',
        wrong={"score": -1.0, "acc": False, "pred": "[TOO LARGE]"},
        label="one",
        reads_answer_line=True,
    ),
    "deepscaler": Reward(
        f"{_HUB}.deepscaler.get_deepscaler_rule_based_reward",
        "after the thinking, the last \\boxed{...} equals one of the labels",
        label="several",
        reads_box=True,
    ),
    "f1": Reward(
        f"{_HUB}.f1.f1_reward", "overlap of words with the label", wrong=0.0, label="one", empty_label=True
    ),
    "gpqa": Reward(
        f"{_HUB}.gpqa.compute_gpqa_reward",
        "the letter of a multiple-choice answer",
        wrong=0.0,
        empty_label=True,
        label_entry="correct_letter",
        metadata=("choices", "valid_letters", "correct_letter"),
    ),
    "ifbench": Reward(
        f"{_HUB}.ifbench.compute_ifbench_reward",
        "all verifiable instructions are followed",
        wrong=0.0,
        needs_label=False,
        metadata=("instruction_id_list", "kwargs"),
    ),
    "remote_rm": Reward(
        f"{_HUB}.remote.remote_rm",
        "the server at --rm-url",
        in_worker=False,
        needs_label=False,
        is_remote=True,
        needs_rm_url=True,
    ),
    "code": Reward(
        "slime.agent.rewards.code.code_reward",
        "the share of the label's tests that the last ```python block passes, run in the --sandbox",
        in_worker=False,
        needs_label=False,  # its own error explains what tests look like
        runs_programs=True,
    ),
    "judge": Reward(
        "slime.agent.rewards.judge.judge_reward",
        "a model scores the response: at --judge-url, or one of this run",
        in_worker=False,
        needs_label=False,
        is_remote=True,
        asks_judge=True,
    ),
    "random": Reward(f"{_HUB}.coin.toss", "0 or 1 by chance", in_worker=False, needs_label=False),
}


def find_reward(rm_type: str | None) -> Reward | None:
    """Return the row of a name, with or without the prefix; None: no built-in reward has that name."""
    return REWARDS.get((rm_type or "").strip().removeprefix(BOXED))
