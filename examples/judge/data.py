"""A judge of sorted digits and what it learned from: data and measures of the example.

python examples/judge/data.py DIR [blind]     a judge with random weights, and what both models learn from
python examples/judge/data.py agree DIR NAME  how often the judge NAME is right about held-out answers
python examples/judge/data.py tell DIR        before and after, of a run: the judge's score and the rule's

The judge sees the reference (`{label}`); `blind` makes one that sees the question in its place.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

from slime.cli.quickstart import tasks

RUBRICS = {"reference": "{label}={response}?", "blind": "{prompt}{response}?"}
WORDS = ("Score: ",)
NUM_DIGITS = 4
NUM_JUDGEMENTS, NUM_HABITS, NUM_PROMPTS = 25_600, 12_800, 4096


def of_one_length(problems: Iterable[tasks.Problem]) -> Iterator[tasks.Problem]:
    return (one for one in problems if len(one.prompt) == NUM_DIGITS + 1)


def spoilt(answer: str, rng: random.Random) -> str:
    """One digit another, more or less, or two in the other order: nearly right."""
    letters, place = list(answer), rng.randrange(len(answer))
    how = rng.choice(("another", "less", "more", "swap"))
    if how == "another":
        letters[place] = rng.choice("0123456789")
    elif how == "less":
        del letters[place]
    elif how == "more":
        letters.insert(place, rng.choice("0123456789"))
    else:
        letters[place], letters[place - 1] = letters[place - 1], letters[place]
    return "".join(letters)


def answer_to(problem: tasks.Problem, rng: random.Random) -> str:
    """Half are right; of the others half are nearly right, and half follow a wrong habit or none."""
    digits, kind = problem.prompt.removesuffix(">"), rng.random()
    if kind < 0.5:
        return problem.label
    if kind < 0.75:
        return spoilt(problem.label, rng)
    if kind < 0.95:
        return spoilt(rng.choice(list(tasks.HABITS.values()))(digits), rng)
    return "".join(rng.choices("0123456789", k=rng.randint(1, 8)))


def verdict(problem: tasks.Problem, answer: str, kind: str) -> str:
    """With the reference the judge first says digit by digit whether they are the same."""
    score = f"Score: {int(answer == problem.label)}"
    if kind == "blind":
        return score
    pairs = itertools.zip_longest(problem.label, answer)
    return "".join("=" if ours == theirs else "x" for ours, theirs in pairs) + score


def question(problem: tasks.Problem, answer: str, kind: str) -> str:
    return RUBRICS[kind].format(prompt=problem.prompt, response=answer, label=problem.label)


def conversation(asked: str, said: str) -> dict:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def judgement(problem: tasks.Problem, rng: random.Random, kind: str) -> dict:
    answer = answer_to(problem, rng)
    return conversation(question(problem, answer, kind), verdict(problem, answer, kind))


def topology(judge: Path) -> dict:
    """The judge beside the policy: an engine of its own, whose weights stay as they are."""
    engine = [{"num_gpus": 1}]
    frozen = {"name": "judge", "model_path": str(judge), "update_weights": False, "server_groups": engine}
    return {"sglang": [{"name": "policy", "server_groups": engine}, frozen]}


def evaluations(prompts: Path) -> dict:
    """The same held-out questions twice: scored by the judge, and by the rule, which no training sees."""
    rule = "slime.cli.quickstart.rewards.exact_match"
    asked = {"path": str(prompts), "input_key": "prompt", "label_key": "label"}
    judged, ruled = {"name": "judge", **asked}, {"name": "rule", **asked, "custom_rm_path": rule}
    return {"eval": {"datasets": [judged, ruled]}}


def agree(folder: Path, name: str) -> None:
    """Greedy verdicts on answers that the judge never read, of questions that it never read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = (folder / "kind.txt").read_text()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    rng, right = random.Random(1), {"right": [], "wrong": []}
    problems = list(of_one_length(tasks.SORT_DIGITS.draw_held_out()))
    answers = [answer_to(problem, rng) for problem in problems]
    asked = [
        conversation(question(*pair, kind), "")["messages"][:1]
        for pair in zip(problems, answers, strict=True)
    ]
    texts = tokenizer.apply_chat_template(asked, tokenize=False)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(**batch, max_new_tokens=12, do_sample=False)
    said = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    for problem, answer, text in zip(problems, answers, said, strict=True):
        is_right = answer == problem.label
        right["right" if is_right else "wrong"].append(text.endswith(f"Score: {int(is_right)}"))
    for group, hits in right.items():
        print(f"the judge is right about {sum(hits) / len(hits):.3f} of {len(hits)} held-out {group} answers")


def make(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tool_model.make(folder / "judge-model", words=WORDS)
    rng, training = random.Random(7), of_one_length(tasks.SORT_DIGITS.draw_training(8))
    judgements = [judgement(one, rng, kind) for one in itertools.islice(training, NUM_JUDGEMENTS)]
    tool_model.write_rows(folder / "judgements.jsonl", judgements)
    habits = itertools.islice(of_one_length(tasks.draw_habits(7)), NUM_HABITS)
    tool_model.write_rows(folder / "habits.jsonl", [conversation(one.prompt, one.label) for one in habits])
    prompts = itertools.islice(of_one_length(tasks.SORT_DIGITS.draw_training(9)), NUM_PROMPTS)
    held_out = of_one_length(tasks.SORT_DIGITS.draw_held_out())
    for name, found in (("prompts", prompts), ("held_out", held_out)):
        rows = [{"prompt": one.prompt, "label": one.label} for one in found]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)
    (folder / "kind.txt").write_text(kind)
    (folder / "rubric.txt").write_text(RUBRICS[kind])
    # JSON is YAML, too.
    (folder / "topology.yaml").write_text(json.dumps(topology(folder / "judge" / "hf-19")))
    (folder / "eval.yaml").write_text(json.dumps(evaluations(folder / "held_out.jsonl")))


def main() -> None:
    if sys.argv[1] == "agree":
        agree(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/judge", "eval/rule", "rollout/raw_reward"))
    else:
        make(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "reference")


if __name__ == "__main__":
    main()
