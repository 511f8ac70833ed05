"""The two quick-start tasks: how problems are drawn, which are held out, and the files of a run.

A held-out problem never appears in SFT or RL data. Which problems are held out depends only on a hash of the
problem, never on the seed of a run, so that runs with different seeds are compared on the same questions.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GREEDY, SAMPLED = "heldout_greedy", "heldout_sampled"  # the two evaluations
HELD_OUT_SEED = 20  # draws the held-out questions; deliberately not the seed of the run


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its correct answer, e.g. `Problem("52831>", "12358")`."""

    prompt: str
    label: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its questions, its reward, and the sentences that explain its result."""

    name: str
    question: str  # the task in one sentence
    split: str  # how held-out questions were chosen, in one sentence
    learned: str  # what a rise in accuracy does and does not mean
    reward_path: str  # plug-in that scores one sample with 0 or 1
    max_response_len: int
    chat: bool  # prompts go through the model's chat template
    draw_training: Callable[[int], Iterator[Problem]]  # seed -> endless training problems
    draw_held_out: Callable[[], list[Problem]]  # always the same list

    @property
    def control_path(self) -> str:
        """Return the plug-in of the random-reward control."""
        return f"{self.reward_path}_control"


def _bucket(key: str, num_buckets: int) -> int:
    """Return a number in [0, num_buckets) that is the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % num_buckets


# --- sort digits --------------------------------------------------------------------------------------------

HABITS: dict[str, Callable[[str], str]] = {
    "sorted": lambda digits: "".join(sorted(digits)),
    "reverse-sorted": lambda digits: "".join(sorted(digits, reverse=True)),
    "reversed": lambda digits: digits[::-1],
    "copied": lambda digits: digits,
}
MIN_DIGITS, MAX_DIGITS = 4, 6
NUM_SORT_HELD_OUT = 512


def digits_held_out(digits: str) -> bool:
    """Return whether a string is held out: one multiset of digits in eight, with all its permutations."""
    return _bucket("digits:" + "".join(sorted(digits)), 8) == 0


def draw_habits(seed: int) -> Iterator[Problem]:
    """Yield SFT pairs without end; each answer follows one of the four habits, all equally likely."""
    rng = random.Random(f"habits-{seed}")
    habits = list(HABITS.values())
    while True:
        digits = _draw_digits(rng, held_out=False)
        yield Problem(prompt=f"{digits}>", label=rng.choice(habits)(digits))


def _draw_digits(rng: random.Random, *, held_out: bool) -> str:
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
        # Skipped if two habits give the same answer: the reward could not distinguish them.
        told_apart = len({habit(digits) for habit in HABITS.values()}) == len(HABITS)
        if told_apart and digits_held_out(digits) == held_out:
            return digits


def _sort_problems(rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
    while True:
        digits = _draw_digits(rng, held_out=held_out)
        yield Problem(prompt=f"{digits}>", label=HABITS["sorted"](digits))


def _sort_held_out() -> list[Problem]:
    found: dict[Problem, None] = {}
    for problem in _sort_problems(random.Random(HELD_OUT_SEED), held_out=True):
        found[problem] = None
        if len(found) == NUM_SORT_HELD_OUT:
            break
    return list(found)


SORT_DIGITS = Task(
    name="sort-digits",
    question="Sort the digits: 52831> should be answered with 12358, exactly.",
    split="One multiset of digits in eight, chosen by hash, is held out: no held-out string, nor any "
    "reordering of its digits, is in the SFT or RL data.",
    learned="The warm-up taught four habits (sort, sort in reverse, reverse, copy) in equal parts; the "
    "reward only checks whether the digits are sorted. RL mostly teaches the model which known behaviour to "
    "choose, and to do it more reliably. The sampled score is what RL optimises; greedy accuracy is higher.",
    reward_path="slime.cli.quickstart.rewards.exact_match",
    max_response_len=8,
    chat=False,
    draw_training=lambda seed: _sort_problems(random.Random(f"sort-{seed}"), held_out=False),
    draw_held_out=_sort_held_out,
)


# --- addition -----------------------------------------------------------------------------------------------

SUMMANDS = range(2, 13)
PHRASINGS = (
    "What is {x} + {y}? Answer with the number only.",
    "What is {x} plus {y}? Answer with the number only.",
    "What does {x} + {y} equal? Answer with the number only.",
)


def pair_held_out(x: int, y: int) -> bool:
    """Return whether a pair is held out: one unordered pair in three, so x + y and y + x are never split."""
    return _bucket(f"sum:{min(x, y)}+{max(x, y)}", 3) == 0


def _addition_problems(*, held_out: bool) -> list[Problem]:
    pairs = [pair for pair in itertools.product(SUMMANDS, repeat=2) if pair_held_out(*pair) == held_out]
    return [Problem(phrase.format(x=x, y=y), str(x + y)) for phrase in PHRASINGS for x, y in pairs]


def _addition_training(seed: int) -> Iterator[Problem]:
    rng = random.Random(f"addition-{seed}")
    problems = _addition_problems(held_out=False)
    while True:
        yield from rng.sample(problems, len(problems))


ADDITION = Task(
    name="addition",
    question="Add two numbers from 2 to 12; the response must end within 12 tokens, and its last number must "
    "be the sum.",
    split="One unordered pair of numbers in three, chosen by hash, is held out, in both orders and all "
    "three phrasings; the phrasings themselves are also trained on.",
    learned="The model could add before, from its pretraining. RL teaches it to answer briefly, to stop, and "
    "to give the right number far more reliably; it did not learn to add.",
    reward_path="slime.cli.quickstart.rewards.last_number",
    max_response_len=12,
    chat=True,
    draw_training=_addition_training,
    draw_held_out=lambda: _addition_problems(held_out=True),
)


# --- files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Paths and sizes of the data of one run."""

    sft: Path | None  # None: the model needs no warm-up
    rl: Path
    held_out: Path
    eval_config: Path
    num_sft: int
    num_rl: int
    num_held_out: int


def write_data(task: Task, folder: Path, *, seed: int, num_sft: int, num_rl: int) -> DataFiles:
    """Write everything `task` needs into `folder`; the same seed gives the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    training = itertools.islice(task.draw_training(seed), num_rl)
    held_out = task.draw_held_out()
    files = DataFiles(
        sft=folder / "sft.jsonl" if num_sft else None,
        rl=folder / "rl.jsonl",
        held_out=folder / "heldout.jsonl",
        eval_config=folder / "eval.yaml",
        num_sft=num_sft,
        num_rl=num_rl,
        num_held_out=len(held_out),
    )
    if files.sft:
        _write_lines(files.sft, map(_conversation, itertools.islice(draw_habits(seed), num_sft)))
    _write_lines(files.rl, map(asdict, training))
    _write_lines(files.held_out, map(asdict, held_out))
    # JSON is valid YAML, so no YAML writer is needed.
    files.eval_config.write_text(json.dumps(eval_config(task, files.held_out), indent=2), encoding="utf-8")
    return files


def eval_config(task: Task, held_out: Path) -> dict[str, Any]:
    """Evaluate the questions twice, greedily and sampled as in training; the true reward scores both."""
    defaults = {
        "path": str(held_out),
        "input_key": "prompt",
        "label_key": "label",
        "custom_rm_path": task.reward_path,
        "apply_chat_template": task.chat,
        "max_response_len": task.max_response_len,
        "n_samples_per_eval_prompt": 1,
        "skip_special_tokens": True,
    }
    temperatures = {GREEDY: 0.0, SAMPLED: 1.0}
    datasets = [defaults | {"name": name, "temperature": t} for name, t in temperatures.items()]
    return {"eval": {"datasets": datasets}}


def _conversation(problem: Problem) -> dict[str, Any]:
    user = {"role": "user", "content": problem.prompt}
    return {"messages": [user, {"role": "assistant", "content": problem.label}]}


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
