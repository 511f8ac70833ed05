"""Model and talks of the example, and its measure.

python examples/geo_zoom/data.py DIR        a model with random weights, talks that look at one of two fields
python examples/geo_zoom/data.py tell DIR   before and after, of a run
"""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "geo_shapes"))  # its data.py makes the model
import tool_model
from data import make_model
from zoom import COLOURS, LIGHTS, covered, uncovered

from slime.utils.media.pictures import picture_url

NUM_TALKS = 5120


def talk(rng: random.Random) -> dict[str, Any]:
    """Look at the marked field, or at the one opposite to it: nothing says which is better."""
    colour, marked = rng.choice(list(COLOURS)), rng.randrange(4)
    pictures = [covered(marked, rng), uncovered(colour, rng.choice(LIGHTS))]
    contents = [("user", "<image>"), ("assistant", str(1 + rng.choice((marked, 3 - marked))))]
    contents += [("tool", "<image>"), ("assistant", colour)]
    messages = [{"role": role, "content": content} for role, content in contents]
    return {"messages": messages, "images": [picture_url(picture) for picture in pictures]}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/Zoom", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    make_model(folder / "model")
    tool_model.write_rows(folder / "talks.jsonl", [talk(rng) for _ in range(NUM_TALKS)])


if __name__ == "__main__":
    main()
