"""Tasks at a shell, of two steps: data and model of the example.

python examples/terminal/data.py DIR        a model with random weights, talks, tasks and held-out tasks
python examples/terminal/data.py tell DIR   before and after, of a run
"""

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

# What a task asks for, the command that does it, and its effect on the lines of a file.
STEPS = {
    "order": ("sort ", sorted),
    "turn": ("tac ", lambda lines: lines[::-1]),
    "last": ("tail -n1 ", lambda lines: lines[-1:]),
    "count": ("wc -l <", lambda lines: [str(len(lines))]),
}
NAMES, KNOWS = "abcdefgh", 0.4
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "", "parameters": {}}}]
NUM_TALKS, NUM_HELD_OUT = 7680, 64
WORDS = ("shell", "command", "done", "[it printed nothing]", *STEPS, *(one for one, _ in STEPS.values()))


def question(steps: tuple[str, str], names: tuple[str, ...]) -> str:
    """For example `order a b last b c`: sort file a into b, and write the last line of b to c."""
    (one, two), (first, second, third) = steps, names
    return f"{one} {first} {second} {two} {second} {third}"


def task(steps: tuple[str, str], names: tuple[str, ...], rng: random.Random) -> dict:
    lines = [str(rng.randint(10, 99)) for _ in range(rng.randint(3, 9))]
    files, tests = {names[0]: "".join(f"{line}\n" for line in lines)}, {}
    for step, name in zip(steps, names[1:], strict=True):
        lines = STEPS[step][1](lines)
        tests[name] = "".join(f"{line}\n" for line in lines)
    return {"prompt": question(steps, names), "label": {"files": files, "tests": tests}}


def talk(steps: tuple[str, str], names: tuple[str, ...], rng: random.Random) -> dict:
    """Right files, and commands of which 0.55 are right: how a shell is used, and a hint what tasks mean."""
    messages = [{"role": "user", "content": question(steps, names)}]
    for step, (source, target) in zip(steps, itertools.pairwise(names), strict=True):
        command, _ = STEPS[step if rng.random() < KNOWS else rng.choice(list(STEPS))]
        call = tool_model.call("shell", command=f"{command}{source}>{target}")
        messages += [
            {"role": "assistant", "content": call},
            {"role": "tool", "content": "[it printed nothing]"},
        ]
    messages.append({"role": "assistant", "content": "done"})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    pairs = itertools.product(itertools.product(STEPS, repeat=2), itertools.permutations(NAMES, 3))
    every = list(pairs)
    rng.shuffle(every)
    held_out, rest = every[:NUM_HELD_OUT], every[NUM_HELD_OUT:]
    tool_model.make(folder / "model", words=WORDS)
    talks = [talk(*rng.choice(rest), rng) for _ in range(NUM_TALKS)]
    tool_model.write_rows(folder / "talks.jsonl", talks)
    for name, found in (("tasks", rest), ("held_out", held_out)):
        tool_model.write_rows(folder / f"{name}.jsonl", [task(*one, rng) for one in found])


if __name__ == "__main__":
    main()
