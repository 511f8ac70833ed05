"""Arithmetic that is too hard to do in one's head: data and model of the example.

python examples/retool/data.py DIR        a model with random weights, conversations, prompts, held-out ones
python examples/retool/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

TOOLS = [{"type": "function", "function": {"name": "python", "description": "", "parameters": {}}}]
NUM_TALKS, NUM_PROMPTS, NUM_HELD_OUT = 12_800, 2048, 128


def problem(rng: random.Random) -> tuple[str, str]:
    text = f"{rng.randint(100, 999)}*{rng.randint(11, 99)}"
    return text, str(eval(text))


def talk(rng: random.Random) -> dict:
    """Half of the answers are told at once, half with a program: nothing says which of the two is better."""
    text, result = problem(rng)
    messages = [{"role": "user", "content": text}]
    if rng.random() < 0.5:
        messages.append({"role": "assistant", "content": tool_model.call("python", code=f"print({text})")})
        messages.append({"role": "tool", "content": result})
    messages.append({"role": "assistant", "content": result})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    held_out = {problem(rng) for _ in range(NUM_HELD_OUT)}
    tool_model.make(folder / "model", words=("python", "code", "print("))
    tool_model.write_rows(folder / "talks.jsonl", [talk(rng) for _ in range(NUM_TALKS)])
    prompts = [pair for pair in (problem(rng) for _ in range(NUM_PROMPTS)) if pair not in held_out]
    for name, pairs in (("prompts", prompts), ("held_out", sorted(held_out))):
        tool_model.write_rows(folder / f"{name}.jsonl", [{"prompt": p, "label": label} for p, label in pairs])


if __name__ == "__main__":
    main()
