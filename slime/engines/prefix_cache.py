"""Middleware for text conversations: sends earlier responses back to the engine as their original token ids.

Tokenising a conversation again may split it differently than the model did, and then log-probs belong to
other tokens. `--router-middleware-paths slime.engines.prefix_cache.PrefixCacheMiddleware` remembers the ids
of each text. A `/generate` with `text` (or `messages`) is sent as `input_ids`: known ids for the longest
known prefix, new ones for the rest. `/retrieve_from_text` returns ids, log-probs, loss mask and weight
versions of a whole conversation, and the ids that its tokens were drawn from, if engines report them.
Responses whose last bytes are half a character are not remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.arguments import Args
from slime.engines.middleware import Forward, RouterAnswer, RouterRequest
from slime.utils import top_p
from slime.utils.processing_utils import load_tokenizer
from slime.wire.protocol import Generation

MAX_TOKENS = 16_000_000
_HALF_CHARACTER = "\ufffd"


@dataclass(eq=False, slots=True)
class PrefixPiece:
    """The ids of one piece of a conversation, after those of `before`. `log_probs` None: not generated."""

    before: PrefixPiece | None
    ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    versions: tuple[str, ...] | None  # one per id
    kept: tuple[np.ndarray, ...] | None = None  # per id the ids it was drawn from; None: not reported
    text: str | None = None  # the conversation's text up to here, while it is cached

    def line(self) -> list[PrefixPiece]:
        """Return the pieces from the beginning of the conversation to here."""
        pieces: list[PrefixPiece] = []
        piece: PrefixPiece | None = self
        while piece is not None:
            pieces.append(piece)
            piece = piece.before
        return pieces[::-1]


class KnownTexts:
    """Texts and their ids; above `max_tokens`, the least recently used are evicted."""

    def __init__(self, max_tokens: int = MAX_TOKENS):
        self._max_tokens = max_tokens
        self._pieces: OrderedDict[str, PrefixPiece] = OrderedDict()  # least recently used first
        self.num_tokens = 0

    def longest_prefix(self, text: str) -> tuple[int, PrefixPiece | None]:
        """Return (number of known characters, their last piece)."""
        known = max((one for one in self._pieces if text.startswith(one)), key=len, default="")
        piece = self._pieces.get(known)
        self._touch(piece)
        return len(known), piece

    def insert(self, text: str, piece: PrefixPiece) -> None:
        """Add `piece`, the end of the conversation `text`. A known text keeps its first ids."""
        if not text or not piece.ids:
            return
        if text not in self._pieces:
            self._pieces[text], piece.text = piece, text
            self.num_tokens += len(piece.ids)
        self._touch(self._pieces[text])
        while self.num_tokens > self._max_tokens and len(self._pieces) > 1:
            _, old = self._pieces.popitem(last=False)
            old.text = None
            self.num_tokens -= len(old.ids)

    def _touch(self, piece: PrefixPiece | None) -> None:
        """Mark a piece and its prefixes as used, so that no prefix is evicted before its continuations."""
        while piece is not None:
            if piece.text is not None:
                self._pieces.move_to_end(piece.text)
            piece = piece.before


class PrefixCacheMiddleware:
    """Implements the module's cache. Requests with `input_ids` pass unchanged."""

    def __init__(self, args: Args):
        self._tokenizer = load_tokenizer(args.hf_checkpoint)
        self._known = KnownTexts()

    async def handle(self, request: RouterRequest, forward: Forward) -> RouterAnswer:
        if request.path == "/retrieve_from_text":
            return await self._retrieve(request.payload)
        if request.path != "/generate" or "input_ids" in request.payload:
            return await forward(request)
        text = self._text_of(request.payload)
        if text is None:
            return await forward(request)
        known, prompt = await self._prompt(text)
        ids = [i for piece in prompt.line() for i in piece.ids]
        sent = {**request.payload, "input_ids": ids, "return_logprob": True}
        for name in ("text", "messages", "tools"):
            sent.pop(name, None)
        answer = await forward(RouterRequest(request.path, sent, request.headers))
        if answer.status != 200:
            return answer
        self._remember(text, prompt, answer.payload)
        cache = {"known_tokens": known, "prompt_tokens": len(ids)}
        return RouterAnswer(200, {**answer.payload, "prompt_ids": ids, "prefix_cache": cache})

    def _text_of(self, payload: dict[str, Any]) -> str | None:
        if isinstance(payload.get("messages"), list):
            text: str = self._tokenizer.apply_chat_template(
                payload["messages"], tools=payload.get("tools"), tokenize=False, add_generation_prompt=True
            )
            return text
        return payload["text"] if isinstance(payload.get("text"), str) else None

    async def _prompt(self, text: str) -> tuple[int, PrefixPiece]:
        """Return (number of known ids, the last piece)."""
        length, piece = self._known.longest_prefix(text)
        known = sum(len(p.ids) for p in piece.line()) if piece is not None else 0
        if length < len(text) or piece is None:
            fresh = text[length:]
            encoded = await asyncio.to_thread(self._tokenizer, fresh, add_special_tokens=False)
            piece = PrefixPiece(piece, tuple(encoded["input_ids"]), None, None)
        return known, piece

    def _remember(self, text: str, prompt: PrefixPiece, answer: dict[str, Any]) -> None:
        made = Generation.from_json(answer)
        assert made.log_probs is not None, "log-probs were requested"
        if prompt.text is None:
            self._known.insert(text, prompt)
        versions = tuple(span.version for span in made.spans for _ in range(span.start, span.end))
        kept = _kept_by_token(answer["meta_info"])
        self._keep(text, PrefixPiece(prompt, made.ids, made.log_probs, versions, kept))
        if made.finish == "stop":  # a client may continue the conversation without the stop token
            shorter = None if kept is None else kept[:-1]
            self._keep(text, PrefixPiece(prompt, made.ids[:-1], made.log_probs[:-1], versions[:-1], shorter))

    def _keep(self, text: str, piece: PrefixPiece) -> None:
        # With special tokens: a chat template writes them, too, in the next request.
        said = self._tokenizer.decode(list(piece.ids), skip_special_tokens=False)
        if said and not said.endswith(_HALF_CHARACTER):
            self._known.insert(text + said, piece)

    async def _retrieve(self, payload: dict[str, Any]) -> RouterAnswer:
        text = self._text_of(payload)
        if text is None:
            return RouterAnswer(400, {"error": "retrieve_from_text needs `text` or `messages`"})
        known, last = await self._prompt(text)
        line = last.line()
        mask = [int(piece.log_probs is not None) for piece in line for _ in piece.ids]
        first = mask.index(1) if 1 in mask else len(mask)
        log_probs = [x for piece in line for x in (piece.log_probs or [0.0] * len(piece.ids))]
        versions = [v for piece in line for v in (piece.versions or [None] * len(piece.ids))]
        answer = {
            "tokens": [i for piece in line for i in piece.ids],
            "loss_mask": mask,
            "rollout_log_probs": log_probs,
            "weight_versions": versions,
            "response_length": len(mask) - first,
            "known_tokens": known,
        }
        return RouterAnswer(200, answer | _nucleus_fields(line, first))


def _kept_by_token(meta: Mapping[str, Any]) -> tuple[np.ndarray, ...] | None:
    found = top_p.from_meta(meta)
    return None if found is None else tuple(np.split(found[0].numpy(), found[1].numpy()[1:-1]))


def _nucleus_fields(line: list[PrefixPiece], first: int) -> dict[str, list[int]]:
    """Return the sample fields for the tokens from `first` on; empty if no engine reported them."""
    if all(piece.kept is None for piece in line):
        return {}
    kept = [ids for piece in line for ids in piece.kept or (np.zeros(0, np.int32),) * len(piece.ids)]
    offsets = np.cumsum([0, *(len(ids) for ids in kept[first:])])
    ids = np.concatenate([np.zeros(0, np.int32), *kept[first:]])
    return {"rollout_top_p_token_ids": ids.tolist(), "rollout_top_p_token_offsets": offsets.tolist()}
