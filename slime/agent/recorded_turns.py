"""The recorded turns of a session, with which a killed run continues its episode.

A turn whose prompt and sampling are those of a recorded turn gets the recorded response. A client program
that has outlived the run sends a conversation with turns that this session has not seen: they come from the
record.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.agent.engine_access import Made
from slime.agent.history import is_answer
from slime.agent.shown_pictures import Placed
from slime.agent.trajectory import Message, TurnNode
from slime.rollout.episode_record import EpisodeRecord

_SEED = "sampling_seed"
_OF_CLIENT = ("new_messages", "tools", "opens_thought", "fork", "changed", "untrained")


@dataclass(slots=True)
class Asked:
    """A turn that was accepted and has no response yet."""

    prompt_ids: Sequence[int]
    sampling: dict[str, Any]
    parent: TurnNode | None
    new_messages: list[Message]
    tools: list[Any]
    opens_thought: bool
    fork: str | None  # why history was rendered again; None: it was not
    number: int  # of the turn, counted from 1, with retries
    changed: dict[str, Any]  # sampling that this turn set itself
    images: list[Placed]  # of the whole prompt
    untrained: str | None = None  # the client's sampling because of which the turn is not trained
    at: float = field(default_factory=time.monotonic)

    @property
    def known(self) -> int:
        """The number of prompt ids that exist in the turn it continues."""
        return self.parent.num_ids if self.parent is not None else 0


class RecordedTurns:
    """The turns of one session in the record of its episode."""

    def __init__(self, record: EpisodeRecord, session_id: str) -> None:
        self._record, self._turns = record, record.turns_of(session_id)
        # By number: turns of an earlier start or attempt, until they are asked for again.
        self._waiting = {turn["number"]: turn for turn in self._turns}
        self._nodes: dict[str, TurnNode] = {}  # by their ids

    def find(self, asked: Asked, *, exact: bool) -> Made | None:
        """Return the recorded response to a prompt; None: it is a new one. `exact`: the number counts too."""
        if not self._waiting:
            return None
        for turn in sorted(self._waiting.values(), key=lambda turn: turn["number"] != asked.number):
            if (exact and turn["number"] != asked.number) or turn["about"] != self._about(asked):
                continue
            if np.array_equal(turn["added"], asked.prompt_ids[asked.known :]):
                asked.number = turn["number"]
                return _made(self._waiting.pop(asked.number))
        return None

    async def add(self, asked: Asked, made: Made, *, of_client: bool) -> None:
        """Record a response; a client's is on the disk when this returns, because the client acts on it."""
        if asked.images:
            self._record.cannot_continue("a restart does not keep the images that were shown")
        turn: dict[str, Any] = {"number": asked.number, "about": self._about(asked)}
        turn["key"] = _key(asked.prompt_ids, made.ids)
        turn |= {name: getattr(made, name) for name in Made.__dataclass_fields__}
        turn["added"] = np.asarray(asked.prompt_ids[asked.known :], dtype=np.int32)
        turn["ids"], turn["log_probs"] = np.asarray(made.ids, dtype=np.int32), np.asarray(made.log_probs)
        if of_client:
            turn["asked"] = {name: getattr(asked, name) for name in _OF_CLIENT}
        await self._record.add_turn(self._turns, turn, wait=of_client)

    def forget(self, asked: Asked) -> None:
        """Remove a response that its client has not received."""
        self._turns[:] = [turn for turn in self._turns if turn["number"] != asked.number]

    def place(self, node: TurnNode) -> None:
        self._nodes[_key(node.ids())] = node

    def restore(self, session: Any, messages: Sequence[Message], tools: list[Any]) -> None:
        """Add the recorded turns that `messages` continue to the `Session`, where it lacks them."""
        ends: dict[str | None, int] = {None: 0}
        for turn in self._turns if self._waiting else ():
            number, key, parent, about = turn["number"], turn["key"], turn["about"][0], turn["asked"]
            start, new = ends.get(parent, len(messages)), about["new_messages"]
            end = start + len(new)
            if end >= len(messages) or messages[start:end] != new or about["tools"] != tools:
                continue
            if number in self._waiting:
                made, before = _made(turn), None if parent is None else self._nodes[parent]
                asked, parsed = session.asked_before(before, turn["added"], made, number=number, **about)
                if is_answer(session.message_of(asked, parsed), messages[end]):
                    del self._waiting[number]
                    session.record(asked, made, parsed)
            if key in self._nodes and is_answer(self._nodes[key].answer, messages[end]):
                ends[key] = end + 1

    def close(self) -> None:
        """Report recorded turns and calls that the generate function did not make again."""
        self._record.check_repeated(len(self._waiting))
        self._waiting.clear()

    def _about(self, asked: Asked) -> list[Any]:
        """Return the key of the turn that this one continues, and its sampling without a drawn seed."""
        own = {name: n for name, n in asked.sampling.items() if name != _SEED or name in asked.changed}
        return [_key(asked.parent.ids()) if asked.parent is not None else None, own]


def _key(*parts: Sequence[int]) -> str:
    return hashlib.blake2b(b"".join(np.asarray(ids, np.int32).tobytes() for ids in parts)).hexdigest()[:24]


def _made(turn: dict[str, Any]) -> Made:
    values = {name: turn[name] for name in Made.__dataclass_fields__}
    return Made(**values | {"ids": turn["ids"].tolist(), "log_probs": turn["log_probs"].tolist()})
