"""The task that the small examples share: sort the digits of a number.

python examples/digits.py model DIR      make a three-layer character model with random weights
python examples/digits.py talks FILE     write conversations of two questions, answered right
python examples/digits.py habits FILE    write questions, answered by one of four habits (one sorts)
python examples/digits.py pairs FILE     write questions with a sorted answer preferred to another habit
python examples/digits.py prompts FILE   write questions alone
python examples/digits.py score DIR...   the share of held-out questions that each model answers right
python examples/digits.py judge DIR      the share of held-out pairs that a reward model ranks right
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from slime.cli.quickstart import tasks, tiny

SEED = 7
NUM_ROWS = {"talks": 8192, "habits": 16384, "pairs": 4096, "prompts": 4096}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def talks() -> Iterator[dict]:
    problems = tasks.SORT_DIGITS.draw_training(SEED)
    while True:
        pair = itertools.islice(problems, 2)
        yield {"messages": [turn for p in pair for turn in (user(p.prompt), assistant(p.label))]}


def habits() -> Iterator[dict]:
    for problem in tasks.draw_habits(SEED):
        yield {"messages": [user(problem.prompt), assistant(problem.label)]}


def make_pair(prompt: str, rng: random.Random) -> dict:
    digits = prompt.removesuffix(">")
    other = rng.choice([habit for name, habit in tasks.HABITS.items() if name != "sorted"])
    answers = tasks.HABITS["sorted"](digits), other(digits)
    return {
        key: [user(prompt), assistant(text)]
        for key, text in zip(("chosen", "rejected"), answers, strict=True)
    }


def pairs() -> Iterator[dict]:
    rng = random.Random(SEED)
    for problem in tasks.SORT_DIGITS.draw_training(SEED):
        yield make_pair(problem.prompt, rng)


def prompts() -> Iterator[dict]:
    for problem in tasks.SORT_DIGITS.draw_training(SEED + 1):
        yield {"prompt": problem.prompt, "label": problem.label}


def make_model(folder: str) -> None:
    tiny.make_checkpoint(Path(folder), seed=SEED)


def write_rows(what: str, file: str) -> None:
    rows = itertools.islice(globals()[what](), NUM_ROWS[what])
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def score(folder: str) -> None:
    """Held-out accuracy: greedy, and sampled at temperature 1, which shows how sure the model is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    problems = tasks.SORT_DIGITS.draw_held_out()
    batch = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    found = {}
    for name, sampled in (("greedy", False), ("sampled", True)):
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
        out = model.generate(
            **batch, max_new_tokens=tasks.SORT_DIGITS.max_response_len, do_sample=sampled, **options
        )
        replies = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found[name] = sum(r == p.label for r, p in zip(replies, problems, strict=True)) / len(problems)
    print(f"held-out accuracy of {folder}: greedy {found['greedy']:.3f}, sampled {found['sampled']:.3f}")


def judge(folder: str) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(SEED)
    rows = [make_pair(p.prompt, rng) for p in tasks.SORT_DIGITS.draw_held_out()]

    def rate(key: str) -> torch.Tensor:
        texts = [tokenizer.apply_chat_template(row[key], tokenize=False) for row in rows]
        with torch.no_grad():
            return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[:, 0] for text in texts])

    margin = rate("chosen") - rate("rejected")
    right = (margin > 0).float().mean()
    print(f"held-out pairs ranked right by {folder}: {right:.3f}, mean margin {margin.mean():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["model", *NUM_ROWS, "score", "judge"])
    parser.add_argument("paths", nargs="+", metavar="PATH")
    options = parser.parse_args()
    make = {"model": make_model, "score": score, "judge": judge}.get(options.what) or partial(
        write_rows, options.what
    )
    for path in options.paths:
        make(path)


if __name__ == "__main__":
    main()
