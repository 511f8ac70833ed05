"""Questions about the world, and conversations in other worlds: data and model of the example.

python examples/search_r1/data.py DIR        a model with random weights, talks, prompts and held-out prompts
python examples/search_r1/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import tool_model
from world import LIES, SYLLABLES, TRADES, World

TOOLS = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]
NOTHING = "nothing found; try other words"
WORDS = (
    *("search", "query", "town of ", "land of ", "town", "land", "[1] ", NOTHING, LIES),
    *(*TRADES, *SYLLABLES),
)
NUM_TALKS, NUM_PROMPTS, NUM_HELD_OUT = 20_480, 2048, 96  # people who are held out
NUM_WORLDS = 64
WAYS = ("guess", "wrong word", "person", "person and town")


def talk(world: World, rng: random.Random) -> dict:
    """Searches for one thing or another, or for nothing, whatever is asked; what is not found is guessed."""
    kind, person = rng.choice(("town", "land")), rng.choice(world.people)
    question, town = f"{kind} of {person}", world.town_of[person]
    messages = [{"role": "user", "content": question}]

    def search(query: str, result: str) -> None:
        messages.append({"role": "assistant", "content": tool_model.call("search", query=query)})
        messages.append({"role": "tool", "content": result})

    answer = rng.choice(world.towns if kind == "town" else world.lands)
    (way,) = rng.choices(WAYS, weights=(5, 5, 4, 6))
    if way == "wrong word":
        search(kind, NOTHING)
    elif way != "guess":
        search(person, f"[1] {world.document_of(person)}")
        if kind == "town":
            answer = town
        if way == "person and town":
            search(town, f"[1] {world.document_of(town)}")
            answer = world.answer(question)
    messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "tools": TOOLS}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/town", "eval/land", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    tool_model.make(folder / "model", words=WORDS)
    worlds = [World(seed) for seed in range(100, 100 + NUM_WORLDS)]
    talks = [talk(rng.choice(worlds), rng) for _ in range(NUM_TALKS)]
    tool_model.write_rows(folder / "talks.jsonl", talks)

    world = World()
    held_out, people = world.people[:NUM_HELD_OUT], world.people[NUM_HELD_OUT:]
    asked = [f"{rng.choice(('town', 'land'))} of {rng.choice(people)}" for _ in range(NUM_PROMPTS)]
    files = {"prompts": asked}
    files |= {kind: [f"{kind} of {person}" for person in held_out] for kind in ("town", "land")}
    for name, questions in files.items():
        rows = [{"prompt": question, "label": world.answer(question)} for question in questions]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
