"""Players of Nim, the games that the warm-up sees, and a score: the example's data and measure.

python examples/textarena/players.py DIR                    a model with random weights, and games at random
python examples/textarena/players.py match MODEL OTHER      games of two models
python examples/textarena/players.py tell DIR               before and after, of a run

`random_move` is an opponent of --env-args.
"""

import random
import re
import sys
from functools import reduce
from operator import xor
from pathlib import Path

from slime.agent.environments.protocol import Item
from slime.agent.environments.textarena import TextArena

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

TASK, PILES = "Nim-v0", [2, 3]
BOARD = "Current Pile:\n"
WORDS = (
    *(BOARD, "  pile 0: ", "  pile 1: ", " from pile ", "[Player 0] ", "[Player 1] "),
    *("Player 0 removes ", "Player 1 removes "),
)
NUM_GAMES, NUM_MATCHES = 2560, 60
MAX_MOVES = 24
_PILE = re.compile(r"^  pile (\d): (\d+)$", re.MULTILINE)
_MOVE = re.compile(r"\[(\d) (\d)\]")
_chance = random.Random(7)


def piles_of(text: str) -> list[int]:
    """The board that a player read last."""
    return [int(number) for _, number in _PILE.findall(text)[-len(PILES) :]]


def moves_of(piles: list[int]) -> list[str]:
    return [f"[{pile} {take}]" for pile, left in enumerate(piles) for take in range(1, left + 1)]


def wins(piles: list[int], move: str) -> bool:
    """Whether a move is one of those that win against everybody."""
    found = _MOVE.fullmatch(move)
    if found is None or move not in moves_of(piles):
        return False
    pile, take = int(found[1]), int(found[2])
    return reduce(xor, [left - take * (number == pile) for number, left in enumerate(piles)]) == 0


def random_move(text: str, rng: random.Random) -> str:
    return rng.choice(moves_of(piles_of(text)))


class RandomPlayer:
    def __init__(self) -> None:
        self.messages: list[dict] = []

    def reply(self, text: str) -> str:
        move = random_move(text, _chance)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": move}]
        return move


class ModelPlayer:
    """A checkpoint that samples its moves, and remembers the game as it was trained to."""

    def __init__(self, model, tokenizer) -> None:
        self.model, self.tokenizer, self.messages = model, tokenizer, []

    def reply(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        prompt = self.tokenizer.apply_chat_template(self.messages, tokenize=False)
        batch = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        out = self.model.generate(**batch, max_new_tokens=8, do_sample=True, top_k=0, top_p=1.0)
        said = out[0, batch["input_ids"].shape[1] :]
        move = str(self.tokenizer.decode(said, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": move})
        return move


def game(seed: int, players: list) -> tuple[dict[int, float], list[list[bool]]]:
    """What the game gave each player, and of the positions that each could win, whether it saw how."""
    arena = TextArena(TASK, {"piles": PILES, "eval_opponent": "self"})
    seen: list[list[bool]] = [[], []]
    now = arena.reset(Item(seed, held_out=True))
    for _ in range(MAX_MOVES):
        piles, move = piles_of(now.text), players[now.player].reply(now.text)
        if any(wins(piles, one) for one in moves_of(piles)):
            seen[now.player].append(wins(piles, move))
        step = arena.step(move)
        if step.done:
            break
        now = step.observation
    return arena.score(), seen


def match(names: list[str]) -> None:
    """Games of two models, each beginning half of them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    loaded = [(AutoModelForCausalLM.from_pretrained(n), AutoTokenizer.from_pretrained(n)) for n in names]
    won, saw = [0, 0], [[], []]
    for number in range(NUM_MATCHES):
        order = [number % 2, 1 - number % 2]  # which of the two sits where
        score, seen = game(2 * number, [ModelPlayer(*loaded[which]) for which in order])
        for seat, which in enumerate(order):
            won[which] += score.get(seat, 0.0) > 0
            saw[which] += seen[seat]
    for which, name in enumerate(names):
        print(
            f"{name} won {won[which]} of {NUM_MATCHES}; it found a winning move in "
            f"{sum(saw[which])} of {len(saw[which])} positions that have one"
        )


def make(folder: Path) -> None:
    """Games of two random players. The rules, the names of piles and the moves are one token each."""
    rows = []
    for number in range(NUM_GAMES):
        players = [RandomPlayer(), RandomPlayer()]
        game(2 * number, players)
        rows += [{"messages": player.messages} for player in players if player.messages]
    rules = {row["messages"][0]["content"].partition(BOARD)[0] for row in rows}
    words = (*sorted(rules), *WORDS, *moves_of(PILES))
    tool_model.make(folder / "model", words=words)
    tool_model.write_rows(folder / "talks.jsonl", rows)


def main() -> None:
    if sys.argv[1] == "match":
        match(sys.argv[2:])
    elif sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/Nim-v0", "rollout/raw_reward"))
    else:
        make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
