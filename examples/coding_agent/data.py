"""Small functions with one wrong operator: data and model of the example.

python examples/coding_agent/data.py DIR        a model with random weights, talks, tasks and held-out
python examples/coding_agent/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

OPERATORS = ("+", "-", "*", "//")
NUM_TALKS, NUM_TASKS, NUM_HELD_OUT = 7680, 2048, 64
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    for name in ("edit_file", "run_tests")
]
WORDS = (
    *("edit_file", "run_tests", "path", "f.py", "old", "new", "a+b", "a-b", "a*b", "a//b", "is changed"),
    *("passed", "failed", "done", "return ", " f(", ")=", '", "arguments": {}}'),
)


def value(operator: str, a: int, b: int) -> int:
    return eval(f"a{operator}b", {"a": a, "b": b})


def task(rng: random.Random) -> dict:
    """A function with a wrong operator, two calls with their right values, and two more that stay hidden."""
    right, wrong = rng.sample(OPERATORS, 2)
    calls = [(rng.randint(20, 53), rng.randint(6, 9)) for _ in range(4)]
    told = [f"f({a},{b})={value(right, a, b)}" for a, b in calls[:2]]
    asserts = [f"assert f({a}, {b}) == {value(right, a, b)}" for a, b in calls]
    source = f"def f(a, b):\n    return a{wrong}b\n"
    label = {"source": source, "shown": asserts[:2], "hidden": asserts[2:]}
    return {"prompt": f"return a{wrong}b {' '.join(told)}", "label": label, "right": right, "wrong": wrong}


def talk(rng: random.Random) -> dict:
    """Edits at random, up to two: how to work with the tools, and nothing about which edit is right."""
    one = task(rng)
    messages = [{"role": "user", "content": one["prompt"]}]
    now, tried = one["wrong"], {one["wrong"]}
    for _ in range(2):
        new = rng.choice([operator for operator in OPERATORS if operator not in tried])
        tried.add(new)
        edit = tool_model.call("edit_file", path="f.py", old=f"a{now}b", new=f"a{new}b")
        messages += [{"role": "assistant", "content": edit}, {"role": "tool", "content": "f.py is changed"}]
        now = new
        messages.append({"role": "assistant", "content": tool_model.call("run_tests")})
        messages.append({"role": "tool", "content": "passed" if now == one["right"] else "failed"})
        if now == one["right"]:
            break
    messages.append({"role": "assistant", "content": "done"})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    held_out = [task(rng) for _ in range(NUM_HELD_OUT)]
    known = {one["prompt"] for one in held_out}
    tool_model.make(folder / "model", words=WORDS)
    tool_model.write_rows(folder / "talks.jsonl", [talk(rng) for _ in range(NUM_TALKS)])
    tasks = [one for one in (task(rng) for _ in range(NUM_TASKS)) if one["prompt"] not in known]
    for name, rows in (("tasks", tasks), ("held_out", held_out)):
        rows = [{"prompt": one["prompt"], "label": one["label"]} for one in rows]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
