"""Wishes of customers, and conversations about them: data and models of the example.

python examples/conversation/data.py DIR        two models with random weights, talks, wishes, held-out ones
python examples/conversation/data.py tell DIR   before and after, of a run
"""

import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

ITEMS = ("bolt", "nut", "screw", "washer", "hinge", "nail")
QUESTIONS = {"item": "which one?", "count": "how many?"}
WORDS = ("book", "item", "count", "booked", "bye", "i want ", "wish ", *QUESTIONS.values(), *ITEMS)
TOOLS = [{"type": "function", "function": {"name": "book", "description": "", "parameters": {}}}]
NUM_TALKS, NUM_HELD_OUT = 7680, 64


def opening(wish: dict) -> str:
    return f"i want {wish[wish['first']]}"


def prompt(wish: dict) -> str:
    """What the customer knows; `first` is what it says without being asked."""
    return f"wish {wish['item']} {wish['count']} {wish['first']}"


def talk_of_customer(wish: dict, rng: random.Random) -> dict:
    messages = [{"role": "user", "content": prompt(wish)}, {"role": "assistant", "content": opening(wish)}]
    for _ in range(rng.randint(1, 2)):
        asked = rng.choice(list(QUESTIONS))
        messages += [
            {"role": "user", "content": QUESTIONS[asked]},
            {"role": "assistant", "content": wish[asked]},
        ]
    return {"messages": messages}


def talk_of_clerk(wish: dict, rng: random.Random) -> dict:
    """A clerk who asks the right question, a useless one or none, and guesses what it was not told."""
    messages, known = [{"role": "user", "content": opening(wish)}], {wish["first"]: wish[wish["first"]]}
    other = next(name for name in QUESTIONS if name != wish["first"])
    asked = rng.choices([other, wish["first"], None], (2, 1, 2))[0]
    if asked is not None:
        messages += [
            {"role": "assistant", "content": QUESTIONS[asked]},
            {"role": "user", "content": wish[asked]},
        ]
        known[asked] = wish[asked]
    guess = {"item": rng.choice(ITEMS), "count": str(rng.randint(10, 99))}
    messages += [
        {"role": "assistant", "content": tool_model.call("book", **{**guess, **known})},
        {"role": "tool", "content": "booked"},
        {"role": "assistant", "content": "bye"},
    ]
    return {"messages": messages, "tools": TOOLS}


def topology(customer: Path) -> dict:
    """The customer has an engine of its own in addition to the policy's, and its weights stay as they are."""
    engine = [{"num_gpus": 1}]
    frozen = {
        "name": "customer",
        "model_path": str(customer),
        "update_weights": False,
        "server_groups": engine,
    }
    return {"sglang": [{"name": "policy", "server_groups": engine}, frozen]}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    every = [
        {"item": item, "count": str(count), "first": first}
        for item, count, first in itertools.product(ITEMS, range(10, 100), QUESTIONS)
    ]
    rng.shuffle(every)
    held_out, rest = every[:NUM_HELD_OUT], every[NUM_HELD_OUT:]
    for name, talk in (("customer", talk_of_customer), ("clerk", talk_of_clerk)):
        tool_model.make(folder / f"{name}-model", words=WORDS)
        talks = [talk(rng.choice(rest if name == "clerk" else every), rng) for _ in range(NUM_TALKS)]
        tool_model.write_rows(folder / f"{name}-talks.jsonl", talks)
    for name, found in (("wishes", rest), ("held_out", held_out)):
        rows = [{"prompt": prompt(one), "label": [one["item"], one["count"]]} for one in found]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)
    # JSON is YAML, too.
    (folder / "topology.yaml").write_text(json.dumps(topology(folder / "customer" / "model")))


if __name__ == "__main__":
    main()
