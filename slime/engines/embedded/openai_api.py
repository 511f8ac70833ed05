"""OpenAI's endpoints of the embedded engine: requests become those of /generate."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from slime.engines.embedded.body_reading import read_json
from slime.engines.embedded.engine_thread import EngineLoop
from slime.engines.embedded.generate_json import raise_failure
from slime.engines.embedded.openai_requests import Asked, OpenAIReader
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import Detokenizer
from slime.wire.openai_shapes import error_json, log_prob_entries

# Reads the body of /generate for a request, and refuses what cannot be served now.
Accept = Callable[[web.Request, dict[str, Any]], Awaitable[tuple[list[Sequence], bool]]]


class OpenAIApi:
    """Handlers of /v1/chat/completions and /v1/completions; tool calls and thoughts stay text."""

    def __init__(self, loop: EngineLoop, reader: OpenAIReader, accept: Accept):
        self._loop, self._reader, self._accept = loop, reader, accept

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._reader.chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._reader.completions)

    async def _serve(
        self, request: web.Request, read: Callable[[dict[str, Any]], Awaitable[Asked]]
    ) -> web.StreamResponse:
        asked = await read(await read_json(request))
        sequences, _ = await self._accept(request, asked.body)
        writer = _Writer(asked, sequences, self._reader.detokenizer)
        listener = self._loop.submit(sequences)
        try:
            if asked.stream:
                return await _write_stream(request, writer, listener.wait)
            while not all(sequence.done for sequence in sequences):
                await listener.wait()
            raise_failure(sequences)
            return web.json_response(writer.whole())
        finally:
            for sequence in sequences:
                self._loop.forget(sequence)


async def _write_stream(
    request: web.Request, writer: "_Writer", wait: Callable[[], Awaitable[list[Sequence]]]
) -> web.StreamResponse:
    """Write what is new of each sequence as it comes.

    Headers go with the first token: until then an error has a status.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    waiting = set(writer.sequences)
    while waiting:
        news = [sequence for sequence in dict.fromkeys(await wait()) if sequence in waiting]
        failed = [sequence for sequence in news if sequence.failed]
        if failed and not response.prepared:
            raise_failure(failed)
        if not response.prepared:
            await response.prepare(request)
            await response.write(b"".join(map(_event, writer.starts())))
        if failed:
            why = failed[0].finish or {}
            await response.write(_event(error_json(str(why.get("message")), "server_error")))
            break
        await response.write(b"".join(_event(chunk) for one in news for chunk in writer.pieces(one)))
        waiting -= {sequence for sequence in news if sequence in writer.ended}
    else:
        if writer.asked.include_usage:
            await response.write(_event(writer.chunk([], usage=writer.usage())))
    await response.write_eof(b"data: [DONE]\n\n")
    return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass(slots=True)
class _Sent:
    """How much of a sequence is in the stream."""

    characters: int = 0
    tokens: int = 0


class _Writer:
    """The JSON of one request's answers, whole or in pieces."""

    def __init__(self, asked: Asked, sequences: list[Sequence], detokenizer: Detokenizer):
        self.asked, self.sequences, self.ended = asked, sequences, set[Sequence]()
        self._detokenizer, self._created = detokenizer, int(time.time())
        self._sent = {sequence: _Sent() for sequence in sequences}
        self._index = {sequence: index for index, sequence in enumerate(sequences)}

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, sequence in enumerate(self.sequences):
            text = self._text(sequence, len(sequence.log_probs))
            said = (
                {"message": {"role": "assistant", "content": text}} if self.asked.is_chat else {"text": text}
            )
            told = self._log_probs(sequence, 0, len(sequence.log_probs), 0)
            choices.append({"index": index, **said, "logprobs": told, "finish_reason": _reason(sequence)})
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        version = self.sequences[0].versions[-1][0] if self.sequences[0].versions else "default"
        made = {**self._head(kind), "choices": choices, "usage": self.usage()}
        return {**made, "metadata": {"weight_version": version}}

    def usage(self) -> dict[str, int]:
        read = sum(len(sequence.prompt) for sequence in self.sequences[:: self.asked.n])
        made = sum(len(sequence.log_probs) for sequence in self.sequences)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, **more}

    def starts(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream: who speaks."""
        if self.asked.is_chat:
            for index in range(len(self.sequences)):
                delta = {"role": "assistant", "content": ""}
                yield self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def pieces(self, sequence: Sequence) -> Iterator[dict[str, Any]]:
        """What is new of one sequence, and how it ended."""
        finish = sequence.finish  # read first: a chunk must not claim an end that came after its tokens
        count, sent = len(sequence.log_probs), self._sent[sequence]
        text = self._text(sequence, count, ended=finish is not None)
        new, start = text[sent.characters :], sent.tokens
        if new or finish is not None:
            told = self._log_probs(sequence, start, count, sent.characters)
            sent.characters, sent.tokens = max(len(text), sent.characters), count
            yield self._piece(sequence, new, told, None if finish is None else _reason(sequence))
        if finish is not None:
            self.ended.add(sequence)

    def _piece(
        self, sequence: Sequence, text: str, told: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.asked.is_chat:
            said = {"delta": {"content": text} if text else {}}
        choice = {"index": self._index[sequence], **said, "logprobs": told, "finish_reason": reason}
        return self.chunk([choice])

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{self.sequences[0].rid}"
        return {"id": name, "object": kind, "created": self._created, "model": self.asked.model}

    def _text(self, sequence: Sequence, count: int, *, ended: bool = True) -> str:
        """The text of the first tokens; before the end without what may become a stop string, or is half a
        character.
        """
        finish = sequence.finish if ended else None
        text = self._detokenizer.answer_text(sequence.output[:count], sequence.sampling, finish)
        if ended:
            return text
        text = text.rstrip("\ufffd")
        held = 0
        for stop in () if sequence.sampling.no_stop_trim else sequence.sampling.stop:
            sizes = range(min(len(stop), len(text)), held, -1)
            held = next((size for size in sizes if stop.startswith(text[-size:])), held)
        return text[: len(text) - held]

    def _log_probs(self, sequence: Sequence, start: int, end: int, offset: int) -> dict[str, Any] | None:
        if not self.asked.log_probs:
            return None
        ids, values = sequence.output[start:end], sequence.log_probs[start:end]
        entries = log_prob_entries(lambda one: self._detokenizer.decode(one, sequence.sampling), ids, values)
        if self.asked.is_chat:
            return {"content": entries}
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": values,
            "token_ids": ids,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _reason(sequence: Sequence) -> str:
    return str(sequence.finish["type"]) if sequence.finish is not None else "stop"
