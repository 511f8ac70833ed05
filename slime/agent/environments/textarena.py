"""TextArena: games for one player, and for several players, all played by the policy (self-play).

Options in --env-args: `opponent` plays the other sides in training: "self" (the default), "random" (a random
legal move, in games that list them) or your function `file.py:move`, which gets the text that this player
reads and returns an action. A function with a second argument also gets a `random.Random` seeded by the item,
so that the same moves meet the same replies. `eval_opponent` (default "random") plays in held-out items;
`num_players` is for games with a variable number. All other options are the game's.
"""

from __future__ import annotations

import inspect
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Item, Observation, StepResult
from slime.utils.misc import load_function

SELF, RANDOM = "self", "random"
MAX_OPPONENT_MOVES = 200  # between two moves of the policy
_LEGAL_MOVES = re.compile(r"(?:available|legal|valid|possible)[^\n:]*:(.*(?:\n(?!\n).*)*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_random_lock = threading.Lock()  # games share Python's global generator; each keeps its own state of it


def task_names() -> list[str]:
    from textarena.envs.registration import ENV_REGISTRY

    return sorted(name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train")))


class TextArena:
    """A game. Players read only what is new since their last move."""

    deterministic = True

    def __init__(self, task: str, options: Mapping[str, Any]):
        own = dict(options)
        self._task = task
        self._opponents = {False: own.pop("opponent", SELF), True: own.pop("eval_opponent", RANDOM)}
        self._asked_players: int | None = own.pop("num_players", None)
        self._game_options = own
        self._seat: int | None = None  # of the policy, if an opponent plays the other sides
        self._randomness = random.getstate()
        self.num_players = 1

    def reset(self, item: Item) -> Observation:
        import textarena

        self._generator = random.Random(item.seed)
        with self._own_randomness(item.seed):
            self._game = self._start(textarena, item.seed)
        opponent = self._opponents[item.held_out]
        if self._players > 1 and opponent != SELF:
            self._move = _opponent_of(opponent)
            self._seat, self.num_players = item.seed // 2 % self._players, 1
        else:
            self.num_players = self._players
        first = self._next_observation()
        if first is None:
            raise EnvironmentFailure("the game ended before the policy's first move")
        return first

    def step(self, action: str) -> StepResult:
        following = None if self._act(action) else self._next_observation()
        return StepResult(following, done=following is None)

    def score(self) -> dict[int, float]:
        """Return the game's reward of each player: usually -1, 0 or 1."""
        rewards, _ = self._game.close()
        given = {int(player): float(reward) for player, reward in (rewards or {}).items()}
        if self._seat is not None:
            return {0: given.get(self._seat, 0.0)}
        return {player: given.get(player, 0.0) for player in range(self.num_players)}

    def _start(self, textarena: Any, seed: int) -> Any:
        """Start the game with the requested number of players, or the first of 1, 2, 3, ... it accepts."""
        refusal: Exception | None = None
        counts = [self._asked_players] if self._asked_players else range(1, 7)
        for self._players in counts:
            raw = textarena.make(f"{self._task}-raw", **self._game_options)
            game = textarena.wrappers.ActionFormattingWrapper(env=raw)
            try:
                game.reset(num_players=self._players, seed=seed)
                return game
            except (AssertionError, ValueError) as error:
                refusal = error
        raise EnvironmentFailure(f"the game cannot start: {refusal}")

    def _act(self, action: str) -> bool:
        with self._own_randomness():
            done, _ = self._game.step(action=action)
        return bool(done)

    def _next_observation(self) -> Observation | None:
        """Let the other side move until it is the policy's turn; None: the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            with self._own_randomness():
                player, messages = self._game.get_observation()
            lines = [said if sender < 0 else f"[Player {sender}] {said}" for sender, said, *_ in messages]
            text = "\n".join(lines).strip() or "Your turn."
            if self._seat is None:
                return Observation(text, player=int(player))
            if player == self._seat:
                return Observation(text)
            if self._act(self._move(text, self._generator)):
                return None
        raise EnvironmentFailure(f"the opponent moved {MAX_OPPONENT_MOVES} times in a row")

    @contextmanager
    def _own_randomness(self, seed: int | None = None) -> Iterator[None]:
        with _random_lock:
            outside = random.getstate()
            random.seed(seed) if seed is not None else random.setstate(self._randomness)
            try:
                yield
            finally:
                self._randomness = random.getstate()
                random.setstate(outside)


make = TextArena  # as `episode` creates the environment of any family


def _opponent_of(name: str) -> Callable[[str, random.Random], str]:
    if name == RANDOM:
        return random_move
    function = load_function(name)
    needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    # A second value is the random generator.
    return lambda text, generator: str(function(*(text, generator)[: len(needed)]))


def random_move(text: str, generator: random.Random) -> str:
    """Return one of the moves in the last list of legal moves."""
    lists = _LEGAL_MOVES.findall(text)
    moves = _MOVE.findall(lists[-1]) if lists else []
    if not moves:
        raise EnvironmentFailure(
            "the game does not name its legal moves, so no opponent can draw one: give a function in "
            '--env-args {"*": {"eval_opponent": "file.py:move"}}, or "self"'
        )
    return generator.choice(moves)
