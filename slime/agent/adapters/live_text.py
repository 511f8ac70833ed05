"""Streaming a response: which part of its text can be sent already, and whether it is thought or text.

Text is held back where it may start a tool call, a stop string or the end of a thought, or where a character
is incomplete. Calls are sent when the response has ended and they are parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime.agent.parsing import THINK_END, THINK_START, ParsedModelOutput

Piece = tuple[str, str]  # ("thought" or "text", what is new of it)
_BROKEN = "\ufffd"


class LiveText:
    """Takes all token ids so far and yields the new pieces of text."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        marks: Sequence[str],
        stops: Sequence[str] = (),
        opens_thought: bool = False,
        held: bool = False,  # nothing is sent before the end, because the parser of thoughts needs all of it
    ) -> None:
        self._tokenizer = tokenizer
        # A single character starts a call only at the start of the response.
        self._first = tuple(mark for mark in marks if len(mark) == 1)
        self._marks = (*(mark for mark in marks if len(mark) > 1), *stops)
        self._state = "held" if held else "thought" if opens_thought else "start"
        self._buffer = ""  # decoded and not shown
        self._start = self._read = 0  # of the ids: where decoding begins, and what is decoded
        self.shown = {"thought": "", "text": ""}

    def feed(self, ids: Sequence[int]) -> Iterator[Piece]:
        """Yield the new text of a response of which `ids` is all that exists."""
        text = self._tokenizer.decode(ids[self._start :], skip_special_tokens=False)
        if text.endswith(_BROKEN):
            return
        before = self._tokenizer.decode(ids[self._start : self._read], skip_special_tokens=False)
        self._buffer += text[len(before) :]
        self._start, self._read = self._read, len(ids)
        yield from self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        if self._state == "start":
            head = self._buffer.lstrip()
            if not head or (THINK_START.startswith(head) and head != THINK_START):
                return
            if head.startswith(THINK_START):
                self._buffer = head[len(THINK_START) :]
                self._state = "thought"
            else:
                self._state = "held" if head[0] in self._first else "text"
        if self._state == "thought":
            thought, ended, rest = self._buffer.partition(THINK_END)
            if not ended:
                yield from self._show("thought", (THINK_END,))
                return
            self._buffer, self._state = rest, "speech"
            yield from self._emit("thought", thought)
        if self._state == "speech":  # after a thought
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return
            self._state = "held" if self._buffer[0] in self._first else "text"
        if self._state == "text":
            places = [self._buffer.find(mark) for mark in self._marks]
            found = min((place for place in places if place >= 0), default=None)
            if found is None:
                yield from self._show("text", self._marks)
                return
            shown, self._buffer, self._state = self._buffer[:found], self._buffer[found:], "held"
            yield from self._emit("text", shown)

    def _show(self, kind: str, marks: Sequence[str]) -> Iterator[Piece]:
        """Yield all but an end that may become one of `marks`."""
        longest = max(map(len, marks), default=1) - 1
        keep = 0
        for size in range(min(longest, len(self._buffer)), 0, -1):
            tail = self._buffer[-size:]
            if any(mark.startswith(tail) for mark in marks):
                keep = size
                break
        cut = len(self._buffer) - keep
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        yield from self._emit(kind, shown)

    def _emit(self, kind: str, text: str) -> Iterator[Piece]:
        if not self.shown[kind]:
            text = text.lstrip("\n") if kind == "thought" else text
        if text:
            self.shown[kind] += text
            yield kind, text

    def rest(self, parsed: ParsedModelOutput) -> Iterator[Piece]:
        """Yield what was not sent yet, once the whole response is parsed."""
        for kind, whole in (("thought", parsed.reasoning), ("text", parsed.text)):
            shown = self.shown[kind]
            seen = next((one for one in (shown, shown.strip()) if whole.startswith(one)), whole)
            yield from self._emit(kind, whole[len(seen) :])
