"""Records each turn of an episode in the ledger, so that a killed run continues the episode in that turn.

The record of an unfinished episode is its sample so far; what else the episode needs is in the sample's
metadata. Before a call with effects the record is on the disk, so that no call is made twice after a crash.

A generate function that uses sessions and tools is called again: its turns and calls come from its log, in
plain values, until it reaches the point of the crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import inspect
import json
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from slime.record.ledger_rows import Event
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import Entry, copy_sample, describe
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# In the metadata of the recorded sample: name of the episode, turns by session, calls of tools and their
# number, and why it cannot be continued (None: it can).
_LOG = "episode_log"
_current: ContextVar[EpisodeRecord | None] = ContextVar("slime_episode_record", default=None)
_call_id: ContextVar[str | None] = ContextVar("slime_call_id", default=None)


class StateLost(RuntimeError):
    """A recorded episode cannot be continued after all: the next attempt starts it again."""


class EpisodeRecord:
    """The record of the episode that the running generate call plays."""

    def __init__(self, ledger: Ledger, origin: Sample) -> None:
        self._ledger, self._origin = ledger, origin
        self._session_id = origin.session_id
        self._found: dict[str, Any] | None = None  # the log of an earlier start or attempt
        self._unused: list[dict[str, Any]] = []  # its calls, until this attempt makes them
        self._num_sessions = Counter[str]()
        self._locks: dict[int, asyncio.Lock] = {}
        self._lock = threading.RLock()  # an endpoint's thread adds turns

    def restored(self, sample: Sample) -> Sample:
        """Return the sample as the last recorded turn left it; the given one if none is recorded."""
        found = self._ledger.unfinished(self._origin)
        if found is None:
            return sample
        self._found = found.metadata.pop(_LOG, None)
        if self._found is None:
            return found
        if _why_not_continued(self._found) is None:
            sample.session_id = self._session_id = found.session_id
        return sample

    async def called(self, call_id: str, sample: Sample | None, *, repeatable: bool) -> None:
        """Record that a call is about to be made; it must not be made before this returns.

        `sample` None: a repeatable call of an episode that needs no record of it.
        """
        value = json.dumps({"id": call_id, "repeatable": repeatable})
        self._ledger.progressed("called", self._origin, value, sample)
        if sample is not None:
            await self._ledger.written()

    async def replied(self, call_id: str, sample: Sample | None, *, wait: bool) -> None:
        """Record the result of a call, with the sample as it is now; `wait` until it is on the disk."""
        self._ledger.progressed("replied", self._origin, json.dumps({"id": call_id}), sample)
        if wait:
            await self._ledger.written()

    def continued(self, call_id: str, how: str) -> None:
        """Record that the episode resumes, with the id of its next call."""
        self._ledger.progressed("continued", self._origin, json.dumps({"id": call_id, "by": how}))

    # -- episodes of generate functions

    @functools.cached_property
    def _log(self) -> dict[str, Any]:
        """What the sessions and tools of this episode have done."""
        fresh = {"name": new_episode(), "turns": {}, "calls": [], "num_calls": 0, "cannot": None}
        if self._found is None:
            return fresh
        if (why := _why_not_continued(self._found)) is not None:
            self._restarts(str(fresh["name"]), why)
            return fresh
        self.continued(f"{self._found['name']}.{self._found['num_calls']}", "its record")
        self._unused = list(self._found["calls"])
        return self._found

    def _restarts(self, name: str, why: str) -> None:
        logger.warning("%s restarts: %s.", describe(self._origin), why)
        self._ledger.progressed("restarted", self._origin, json.dumps({"id": f"{name}.0", "by": why}))

    def turns_of(self, session_id: str) -> list[dict[str, Any]]:
        """Return the recorded turns of the next session with this id, to which `add_turn` adds."""
        with self._lock:
            self._num_sessions[session_id] += 1
            turns: dict[str, list[dict[str, Any]]] = self._log["turns"]
            return turns.setdefault(f"{session_id} {self._num_sessions[session_id]}", [])

    async def add_turn(self, turns: list[dict[str, Any]], turn: dict[str, Any], *, wait: bool) -> None:
        with self._lock:
            turns.append(turn)
            self._progressed("answered", id=self._log["name"])
        if wait:
            await self._ledger.written()

    def cannot_continue(self, why: str) -> None:
        """From now on a crash makes the episode start again."""
        self._log["cannot"] = self._log["cannot"] or why

    def check_repeated(self, num_turns: int) -> None:
        """Report a generate function that took another way than before the crash."""
        if num_turns or self._unused:
            what = f"{num_turns} of its recorded turns and {len(self._unused)} calls"
            self._restarts(new_episode(), f"its generate function did not repeat {what}")
            self._unused = []

    async def once(
        self,
        what: list[Any],
        make: Callable[[], Awaitable[Any]],
        *,
        repeatable: bool,
        survives: bool,
        owner: Any,
    ) -> Any:
        """Return the result of a call of a tool, `what[0]`, that an episode makes once.

        `repeatable`: it may be made again. `survives`: what it changes is not lost with this process, or is
        part of the state that `owner` saves and restores.
        """
        saves = survives and callable(getattr(owner, "save", None))
        async with self._locks.setdefault(id(owner), asyncio.Lock()) if saves else contextlib.nullcontext():
            call = self._find_call(what, repeatable)
            if call["result"] is not None and survives:
                if saves:
                    await self._restore(owner, call)
                return call["result"]
            if not (survives or repeatable):
                self.cannot_continue(f"{what[0]} keeps its state in the process of the run")
            self._progressed("called", id=call["id"], repeatable=repeatable, tool=what[0])
            if not repeatable or saves:
                await self._ledger.written()
            before = _call_id.set(call["id"])
            try:
                result = await make()
            except BaseException:  # it was cancelled, or its server died
                self._progressed("replied", id=call["id"])
                raise
            finally:
                _call_id.reset(before)
            state = await self._save(what[0], owner) if saves else None
            with self._lock:
                call.update(result=call["result"] or result, state=state)
                self._progressed("replied", id=call["id"])
            return call["result"]

    async def _save(self, tool: str, owner: Any) -> Any:
        """Return the state of a tool's object; the name of a file, if the state is bytes."""
        try:
            state = copy.deepcopy(await _value_of(owner.save()))
            return await asyncio.to_thread(self._keep_file, state) if isinstance(state, bytes) else (state,)
        except Exception as error:
            self.cannot_continue(f"the state of {tool} cannot be saved ({error})")

    def _keep_file(self, data: bytes) -> str:
        path = self._ledger.files_of(self._origin) / hashlib.blake2b(data, digest_size=12).hexdigest()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            (part := path.with_suffix(f".{uuid4().hex}")).write_bytes(data)
            part.replace(path)
        return path.name

    async def _restore(self, owner: Any, call: dict[str, Any]) -> None:
        try:
            state = call["state"]
            if isinstance(state, str):
                state = (await asyncio.to_thread((self._ledger.files_of(self._origin) / state).read_bytes),)
            await _value_of(owner.restore(copy.deepcopy(state[0])))
        except Exception as error:
            self.cannot_continue(f"the state of {call['tool']} cannot be restored ({error})")
            self._progressed("answered", id=self._log["name"])
            raise StateLost(f"the state of {call['tool']} is lost; the next attempt starts again") from error

    def _find_call(self, what: list[Any], repeatable: bool) -> dict[str, Any]:
        """Return the call as it was recorded, or a new one."""
        key = hashlib.blake2b(json.dumps(what, default=str).encode(), digest_size=8).hexdigest()
        with self._lock:
            log = self._log
            for place, call in enumerate(self._unused):
                if call["key"] == key:
                    return self._unused.pop(place)
            call = {"id": f"{log['name']}.{log['num_calls']}", "key": key, "tool": what[0]}
            log["calls"].append(call | {"repeatable": repeatable, "result": None, "state": None})
            log["num_calls"] += 1
            return log["calls"][-1]

    def _progressed(self, event: Event, **value: Any) -> None:
        """Report an event together with the log as it is now."""
        with self._lock:
            sample = copy_sample(self._origin)
            sample.session_id = self._session_id
            if self._log["cannot"] is not None:
                self._log.update(turns={}, calls=[])
            sample.metadata[_LOG] = self._log
            self._ledger.progressed(event, self._origin, json.dumps(value), sample)


async def _value_of(made: Any) -> Any:
    return await made if inspect.isawaitable(made) else made


def _why_not_continued(log: dict[str, Any]) -> str | None:
    for call in log["calls"]:
        if call["result"] is None and not call["repeatable"]:
            return f"its run ended in a call of {call['tool']}, which is not `repeatable`"
    return log["cannot"]


def current() -> EpisodeRecord | None:
    """Return the record of the running generate call; None: its run or rollout keeps none."""
    return _current.get()


def call_id() -> str | None:
    """Return the id of the running tool call, the same when it is made again; None: nothing is recorded."""
    return _call_id.get()


def new_episode() -> str:
    """Return a name for an episode; the ids of its calls begin with it."""
    return uuid4().hex[:16]


@contextlib.contextmanager
def entered(ledger: Ledger | None, origin: Entry) -> Iterator[None]:
    """Let the generate call of this entry find its record, if the ledger keeps samples."""
    is_kept = ledger is not None and ledger.keeps and isinstance(origin, Sample)
    before = _current.set(EpisodeRecord(ledger, origin) if is_kept else None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _current.reset(before)
