"""Questions that only the server can answer: data and model of the example.

python examples/mcp_tools/data.py DIR        a model with random weights, talks, prompts and held-out prompts
python examples/mcp_tools/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import server
import tool_model

ITEMS = ("bolt", "nut", "screw", "washer", "hinge", "nail")
TOOLS = [{"type": "function", "function": {"name": "stock", "description": "", "parameters": {}}}]
NUM_TALKS, NUM_PROMPTS, NUM_HELD_OUT = 12_800, 2048, 128


def question(rng: random.Random) -> tuple[str, str]:
    return str(rng.randint(100, 999)), rng.choice(ITEMS)


def talk(rng: random.Random) -> dict:
    """Half of the answers are guesses, half come from the server: nothing says which is better."""
    store, item = question(rng)
    messages = [{"role": "user", "content": f"{item} {store}"}]
    if rng.random() < 0.5:
        call = tool_model.call("stock", store=store, item=item)
        messages += [{"role": "assistant", "content": call}]
        messages += [{"role": "tool", "content": server.amount(store, item)}]
        messages.append({"role": "assistant", "content": server.amount(store, item)})
    else:
        messages.append({"role": "assistant", "content": str(rng.randint(10, 99))})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    held_out = {question(rng) for _ in range(NUM_HELD_OUT)}
    tool_model.make(folder / "model", words=("stock", "store", "item", *ITEMS))
    tool_model.write_rows(folder / "talks.jsonl", [talk(rng) for _ in range(NUM_TALKS)])
    prompts = [pair for pair in (question(rng) for _ in range(NUM_PROMPTS)) if pair not in held_out]
    for name, pairs in (("prompts", prompts), ("held_out", sorted(held_out))):
        rows = [{"prompt": f"{item} {store}", "label": server.amount(store, item)} for store, item in pairs]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
