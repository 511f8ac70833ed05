"""Three tasks of reasoning-gym: settings, conversations and model of the example.

python examples/reasoning_gym/data.py DIR        a model with random weights, talks, and the tasks' settings
python examples/reasoning_gym/data.py tell DIR   before and after, of a run
"""

import ast
import json
import random
import sys
from pathlib import Path

from slime.agent.environments.protocol import Item
from slime.agent.environments.reasoning_gym import ReasoningGym
from slime.agent.environments.rows import seed_of

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

SETTINGS = {
    "number_sorting": {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "palindrome_generation": {"min_length": 3, "max_length": 4},
}
NUM_TALKS = 25_600
SHARE_RIGHT = 0.6  # of the answers in the warm-up
START = ": "  # the last one stands before what is asked; the text up to it is the same in all of a task
WORDS = (*(f"{number}.0" for number in range(10)), "['", "', '", "']", ", ")


def wrong_habit(task: str, asked: str, answer: str) -> str:
    """An answer to another question: the other order, the word or the letters as they are."""
    if task == "number_sorting":
        return str(ast.literal_eval(answer)[::-1])
    return asked.replace(", ", "")


def talk(task: str, number: int, rng: random.Random) -> tuple[set[str], dict]:
    """A question of training, answered right or by the wrong habit, right a little more often.

    With it come the parts of its text that are always the same.
    """
    game = ReasoningGym(task, SETTINGS[task])
    question = game.reset(Item(seed_of(number, held_out=False))).text
    fixed, _, rest = question.rpartition(START)
    asked, _, more = rest.partition("\n")
    answer = game.entry["answer"]
    if rng.random() > SHARE_RIGHT:
        answer = wrong_habit(task, asked, answer)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {fixed + START, more} - {""}, {"messages": messages}


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], (*(f"eval/{task}" for task in SETTINGS), "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    drawn = [talk(rng.choice(list(SETTINGS)), number, rng) for number in range(NUM_TALKS)]
    fixed = sorted(set().union(*(parts for parts, _ in drawn)))
    tool_model.make(folder / "model", words=(*fixed, *WORDS))
    tool_model.write_rows(folder / "talks.jsonl", [row for _, row in drawn])
    (folder / "settings.json").write_text(json.dumps(SETTINGS))


if __name__ == "__main__":
    main()
