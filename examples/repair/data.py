"""Projects of three files, one of them wrong: data and model of the example.

python examples/repair/data.py DIR        a model with random weights, talks, tasks and held-out tasks
python examples/repair/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

OPERATORS = ("+", "-", "*")
NAMES = ("a.py", "b.py", "c.py")
NUM_TALKS, NUM_TASKS, NUM_HELD_OUT = 7680, 2048, 64
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    for name in ("edit_file", "run_tests")
]
WORDS = (
    *("edit_file", "run_tests", "path", "old", "new", "is changed", *NAMES, "passed", "done", " f(", ")="),
    *(f"a{operator}b" for operator in OPERATORS),
    '", "arguments": {}}',
)


def value(operator: str, a: int, b: int) -> int:
    return eval(f"a{operator}b", {"a": a, "b": b})


def task(rng: random.Random) -> dict:
    """Three files with a function each; one file has another operator than its tests want."""
    right = {name: rng.choice(OPERATORS) for name in NAMES}
    now, broken = dict(right), rng.choice(NAMES)
    now[broken] = rng.choice([operator for operator in OPERATORS if operator != right[broken]])
    calls = [(name, rng.randint(20, 53), rng.randint(6, 9)) for _ in range(2) for name in NAMES]
    cases = [[name, a, b, value(right[name], a, b)] for name, a, b in calls]
    files = {name: f"def f(a, b):\n    return a{operator}b\n" for name, operator in now.items()}
    label = {"files": files, "shown": cases[:3], "hidden": cases[3:]}
    prompt = " ".join(f"{name} a{operator}b" for name, operator in now.items())
    return {"prompt": prompt, "label": label, "now": now, "right": right, "broken": broken}


def failure(one: dict, now: dict) -> str:
    """What the tests print."""
    for name, a, b, right in one["label"]["shown"]:
        if value(now[name], a, b) != right:
            return f"{name} f({a},{b})={right}"
    return "passed"


def talk(rng: random.Random) -> dict:
    """Half read the tests, and half of these then make the right edit; all other edits are random."""
    one = task(rng)
    messages, now = [{"role": "user", "content": one["prompt"]}], dict(one["now"])

    def run_tests():
        messages.append({"role": "assistant", "content": tool_model.call("run_tests")})
        messages.append({"role": "tool", "content": failure(one, now)})

    has_read = rng.random() < 0.5
    if has_read:
        run_tests()
    name = rng.choice(NAMES)
    new = rng.choice([operator for operator in OPERATORS if operator != now[name]])
    if has_read and rng.random() < 0.5:
        name, new = one["broken"], one["right"][one["broken"]]
    edit = tool_model.call("edit_file", path=name, old=f"a{now[name]}b", new=f"a{new}b")
    messages += [{"role": "assistant", "content": edit}, {"role": "tool", "content": f"{name} is changed"}]
    now[name] = new
    if rng.random() < 0.3:
        run_tests()
    messages.append({"role": "assistant", "content": "done"})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    held_out = [task(rng) for _ in range(NUM_HELD_OUT)]
    known = [one["label"]["shown"] for one in held_out]
    tool_model.make(folder / "model", words=WORDS)
    tool_model.write_rows(folder / "talks.jsonl", [talk(rng) for _ in range(NUM_TALKS)])
    tasks = [one for one in (task(rng) for _ in range(NUM_TASKS)) if one["label"]["shown"] not in known]
    for name, rows in (("tasks", tasks), ("held_out", held_out)):
        rows = [{"prompt": one["prompt"], "label": one["label"]} for one in rows]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
