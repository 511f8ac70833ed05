"""OpenAI's endpoints of the embedded engine: requests become those of /generate."""

import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.engines.embedded.engine_thread import EngineLoop, Listener
from slime.engines.embedded.generate_json import raise_failure
from slime.engines.embedded.openai_requests import Asked, OpenAIReader
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import Detokenizer
from slime.wire.openai_shapes import error_json, log_prob_entries

# Reads the body of /generate, and refuses what cannot be served now.
Accept = Callable[[dict[str, Any]], Awaitable[tuple[list[Sequence], bool]]]


class OpenAIApi:
    """Handlers of /v1/chat/completions and /v1/completions; tool calls and thoughts stay text."""

    def __init__(self, loop: EngineLoop, reader: OpenAIReader, accept: Accept):
        self._loop, self._reader, self._accept = loop, reader, accept

    async def chat(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await self._serve(request, await self._reader.chat(body))

    async def completions(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await self._serve(request, await self._reader.completions(body))

    async def _serve(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        sequences, _ = await self._accept(asked.body)
        writer = _Writer(asked, sequences, self._reader.detokenizer)
        if asked.stream:
            with self._loop.submit(sequences) as listener:
                return await _write_stream(request, writer, listener)
        await self._loop.finish(sequences)
        raise_failure(sequences)
        return web.json_response(writer.whole())


async def _write_stream(request: web.Request, writer: "_Writer", listener: Listener) -> web.StreamResponse:
    """Write what is new of each sequence as it comes.

    Headers go with the first token: until then an error has a status.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    waiting = set(writer.sequences)
    while waiting:
        news = [sequence for sequence in await listener.wait() if sequence in waiting]
        failed = [sequence for sequence in news if sequence.failed]
        events = []
        if not response.prepared:
            raise_failure(failed)
            await response.prepare(request)
            events = writer.starts()
        if failed:
            why = failed[0].finish or {}
            await response.write(_event(error_json(str(why.get("message")), "server_error")))
            break
        for sequence in news:
            piece, ended = writer.piece(sequence)
            events += piece
            waiting -= {sequence} if ended else set()
        await response.write(b"".join(map(_event, events)))
    else:
        if writer.asked.include_usage:
            await response.write(_event(writer.chunk([], usage=writer.usage())))
    await response.write_eof(b"data: [DONE]\n\n")
    return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class _Writer:
    """The JSON of one request's answers, whole or in pieces."""

    def __init__(self, asked: Asked, sequences: list[Sequence], detokenizer: Detokenizer):
        self.asked, self.sequences = asked, sequences
        self._detokenizer, self._created = detokenizer, int(time.time())
        self._sent = dict.fromkeys(sequences, (0, 0))  # characters and tokens that are in the stream
        self._index = {sequence: index for index, sequence in enumerate(sequences)}

    def whole(self) -> dict[str, Any]:
        choices = []
        for sequence in self.sequences:
            count = len(sequence.log_probs)
            text = self._text(sequence, count, ended=True)
            message = {"message": {"role": "assistant", "content": text}}
            said = message if self.asked.is_chat else {"text": text}
            choices.append(self._choice(sequence, said, (0, count, 0), ended=True))
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        versions = self.sequences[0].versions
        metadata = {"weight_version": versions[-1][0] if versions else "default"}
        return {**self._head(kind), "choices": choices, "usage": self.usage(), "metadata": metadata}

    def usage(self) -> dict[str, int]:
        read = sum(len(sequence.prompt) for sequence in self.sequences[:: self.asked.n])
        made = sum(len(sequence.log_probs) for sequence in self.sequences)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, **more}

    def starts(self) -> list[dict[str, Any]]:
        """The first events of a stream: who speaks."""
        delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        count = len(self.sequences) if self.asked.is_chat else 0
        return [self.chunk([{"index": index, **delta}]) for index in range(count)]

    def piece(self, sequence: Sequence) -> tuple[list[dict[str, Any]], bool]:
        """What is new of one sequence, and whether it has ended."""
        ended = sequence.done  # read first: a chunk must not claim an end that came after its tokens
        count, (characters, tokens) = len(sequence.log_probs), self._sent[sequence]
        text = self._text(sequence, count, ended=ended)
        new = text[characters:]
        if not new and not ended:
            return [], False
        self._sent[sequence] = max(len(text), characters), count
        delta = {"delta": {"content": new} if new else {}}
        said = delta if self.asked.is_chat else {"text": new}
        return [self.chunk([self._choice(sequence, said, (tokens, count, characters), ended=ended)])], ended

    def _choice(
        self, sequence: Sequence, said: dict[str, Any], part: tuple[int, int, int], *, ended: bool
    ) -> dict[str, Any]:
        """`part`: first and last of the tokens that are told, and how many characters are before them."""
        reason = str(sequence.finish["type"]) if ended and sequence.finish is not None else None
        told = self._log_probs(sequence, *part) if self.asked.log_probs else None
        return {"index": self._index[sequence], **said, "logprobs": told, "finish_reason": reason}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{self.sequences[0].rid}"
        return {"id": name, "object": kind, "created": self._created, "model": self.asked.model}

    def _text(self, sequence: Sequence, count: int, *, ended: bool) -> str:
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

    def _log_probs(self, sequence: Sequence, start: int, end: int, offset: int) -> dict[str, Any]:
        ids, values = sequence.output[start:end], sequence.log_probs[start:end]
        entries = log_prob_entries(lambda one: self._detokenizer.decode(one, sequence.sampling), ids, values)
        if self.asked.is_chat:
            return {"content": entries}
        tokens = [entry["token"] for entry in entries]
        offsets = itertools.accumulate(map(len, tokens), initial=offset)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "token_ids": ids,
            "top_logprobs": None,
            "text_offset": list(offsets)[:-1],
        }
