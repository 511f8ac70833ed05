"""Compares a server with the reference, one feature after the other, and names the likeliest fault."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from slime.cli.probe.reference import Reference, siblings
from slime.cli.probe.server import ProbedServer
from slime.cluster.canary.probe import TEXTS, LogProbs, compare, pattern_of, probe_tokens
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError

_FLOOR = 0.005  # of the tolerance
_NOISE = 3.0  # the tolerance, as a multiple of what bfloat16 changes
_CLOSER = 3.0  # a fault is named if the server is this much closer to it than to what it should serve
_EQUAL = 1e-4  # no fault is searched below this mean difference
_MADE = 16  # tokens of each generated response
_LONG, _LONGEST = 1024, 16_384  # tokens of the long prompt: two chunks of a prefill, if their size is known
_CHATS = (
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a city."},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Another one, please."},
    ],
)
_CHAT = 5.0  # a single token may differ by this multiple of the tolerance
# What a row that differs says, where the weights are right.
_CAUSES = {
    "generated tokens": "prompts agree, so decoding is at fault: CUDA graphs, speculation or a cache in FP8.",
    "tokens in a batch": "single requests agree, so requests that run together disturb each other.",
    "first use of a prefix": "short prompts agree, so attention over longer ones is at fault.",
    "cached prefix": "the same prompt agreed without the prefix cache, so the cache is at fault; flush it.",
    "long prompt": "shorter ones agree, so chunked prefill or the positions of long prompts are at fault.",
    "weight version": "the server reports another one; a push did not reach it, or was not counted.",
    "tokenizer": "the server splits text otherwise, or adds a token: compare its tokenizer files.",
    "chat template": "the server renders chats otherwise: compare its --chat-template and template files.",
    "without the adapter": "requests that name no adapter do not get the model alone.",
}
# Settings of a server that change its numbers, as SGLang reports them.
_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "speculative_algorithm", "chunked_prefill_size")


Finding = tuple[bool | None, str]  # whether it is right (None: not checked), and numbers or the reason


class Probe:
    """Probes one server; `rows` are lines of text about what was found so far."""

    def __init__(self, server: ProbedServer, reference: Reference, options: argparse.Namespace):
        self._reference, self._options = reference, options
        self._server = replace(server, adapter=_served_adapter(server, options))
        self._texts = [list(ids) for ids in probe_tokens(reference.tokenizer)]
        self._expected = reference.score(self._texts)
        noise = _gap(self._expected, reference.rounded(self._texts))
        self._tolerance = options.tolerance or max(_FLOOR, _NOISE * noise)
        self.rows: list[str] = []
        self._wrong: list[str] = []

    def run(self) -> tuple[str, bool]:
        """Return the diagnosis in one line, and whether the server serves what it should."""
        held = [run(self._server.score(ids)) for ids in self._texts]
        gap = _gap(self._expected, held)
        fault = self._fault_of(held, gap) if not gap <= _EQUAL else None
        is_right = fault is None and gap <= self._tolerance
        self._add("prompts", is_right, self._numbers(self._expected, held))
        if not is_right:
            fault = f"the server {fault}." if fault else self._unknown(held)
            return f"Diagnosis: {fault}{self._settings()}", False
        self._check_generation()
        checks = {
            "weight version": self._check_version,
            "tokenizer": self._check_tokenizer,
            "chat template": self._check_chats,
            "without the adapter": self._check_without_adapter,
        }
        for name, check in checks.items():
            try:
                if found := check():
                    self._add(name, *found)
            except HttpError as error:
                self._add(name, None, f"not checked: {str(error).splitlines()[0][:120]}")
        for name in self._wrong:
            said = f"the weights are right. Fault in {name}: {_CAUSES[name]}"
            return f"Diagnosis: {said}{self._settings()}", False
        what = " with this adapter" if self._options.adapter else ""
        return f"Diagnosis: the server computes with these weights{what}; nothing differs.", True

    # -- which weights

    def _fault_of(self, held: LogProbs, gap: float) -> str | None:
        """Return the fault that explains the log-probs clearly better than the right weights do."""
        is_apart, found = not gap <= self._tolerance, list[tuple[float, str]]()
        near = siblings(self._options.adapter or self._options.model)
        others = [*self._options.other, *(near if is_apart or self._options.adapter else [])]
        for faults in (self._reference.likely_faults(others), self._reference.weight_faults()):
            for text, context in faults:
                with context:
                    apart = _gap(self._reference.score(self._texts), held)
                if apart <= self._tolerance and not apart * _CLOSER >= gap:
                    found.append((apart, text))
            if found or not is_apart:
                break
        return min(found)[1] if found else None

    def _unknown(self, held: LogProbs) -> str:
        """Describe differences that no known fault explains."""
        [reading] = compare(self._expected, {"server": held})
        if all(abs(text[0]) <= self._tolerance < abs(text[1]) for text in reading.gaps):
            return "the first token of each text agrees and the next one differs: positions or attention."
        pattern = pattern_of(reading, self._tolerance)
        return f"{pattern}; no known fault gives these numbers (try --other DIR)."

    # -- one feature after the other

    def _check_generation(self) -> None:
        """Compare the log-probs of sampled tokens: alone, together, with a cached and with a long prompt."""
        joined = [token for ids in self._texts for token in ids]
        prompts = [ids[: len(ids) // 2] for ids in self._texts]
        # A beginning that no earlier probe sent, so that only the second request meets the prefix cache.
        cached = [*random.sample(joined, min(8, len(joined))), *joined]
        info = self._server.info
        chunk = int((info and info.raw.get("chunked_prefill_size")) or 0)
        room = (info and info.context_len) or _LONG
        length = min(max(2 * chunk, _LONG), _LONGEST, room - 2 * _MADE)
        long = (joined * (length // len(joined) + 1))[:length]
        for name, rounds in {
            "generated tokens": [[prompt] for prompt in prompts],
            "tokens in a batch": [prompts],
            "first use of a prefix": [[cached]],
            "cached prefix": [[cached]],
            "long prompt": [[long]],
        }.items():
            made = [pair for sent in rounds for pair in zip(sent, self._generate(sent), strict=True)]
            own = [self._reference.score([[*ids, *new]])[0][-len(new) :] for ids, (new, _) in made if new]
            held = [scores for _, (new, scores) in made if new]
            if not held:
                self._add(name, None, "the server does not report the ids of sampled tokens")
                continue
            detail = f"; {length} tokens" if name == "long prompt" else ""
            self._add(name, _gap(own, held) <= self._tolerance, self._numbers(own, held) + detail)

    def _generate(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        async def generate() -> list[tuple[list[int], list[float]]]:
            return list(await asyncio.gather(*(self._server.generate(ids, _MADE) for ids in prompts)))

        return run(generate())

    def _check_version(self) -> Finding | None:
        info, wanted = self._server.info, self._options.weight_version
        if wanted is None or info is None:
            return None
        held = info.weight_version
        return held == wanted, f"the server reports {held}, expected {wanted}"

    def _check_tokenizer(self) -> Finding:
        encode = self._reference.tokenizer.encode
        pairs = [(run(self._server.count_tokens(text)), len(encode(text))) for text in TEXTS]
        counts = ", ".join(f"{held} of {own}" for held, own in pairs)
        return all(held == own for held, own in pairs), f"tokens of four texts: {counts}"

    def _check_chats(self) -> Finding:
        """Compare the server's chat template: by the length of prompts, and by the token after them."""
        tokenizer = self._reference.tokenizer
        if not tokenizer.chat_template:
            return None, "the model folder has none"
        for chat in _CHATS:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            length, held = run(self._server.chat(chat))
            own = float(self._reference.table(ids)[-1].max())
            if (
                length != len(ids)
                or not abs((own if held is None else held) - own) <= _CHAT * self._tolerance
            ):
                said = f"a chat of {len(chat)} messages has {length} tokens, expected {len(ids)}"
                return False, f"{said}; its first token has log-prob {held}, expected {own:.3f}"
        return True, f"{len(_CHATS)} chats"

    def _check_without_adapter(self) -> Finding | None:
        """Check that requests that name no adapter get the model alone."""
        if self._options.adapter is None or self._server.adapter is None:
            return None
        plain = replace(self._server, adapter=None)
        held = [run(plain.score(ids)) for ids in self._texts]
        with self._reference.lm.disable_adapter():
            own = self._reference.score(self._texts)
        if _gap(self._expected, held) < _gap(own, held):
            return None, "the server applies the adapter to every request"
        return _gap(own, held) <= self._tolerance, self._numbers(own, held)

    # -- what is said

    def _add(self, name: str, is_right: bool | None, text: str) -> None:
        mark = {True: "ok", False: "DIFFERENT", None: "-"}[is_right]
        self.rows.append(f"  {name:<22} {mark:<10} {text}")
        self._wrong += [name] if is_right is False else []

    def _numbers(self, own: LogProbs, held: LogProbs) -> str:
        [reading] = compare(own, {"server": held})
        return f"mean {reading.mean:.2g}, largest {reading.largest:.2g} (tolerance {self._tolerance:.2g})"

    def _settings(self) -> str:
        raw = self._server.info.raw if self._server.info is not None else {}
        said = ", ".join(f"{name} {raw[name]}" for name in _SETTINGS if raw.get(name) not in (None, "auto"))
        return f" Settings of the server: {said}." if said else ""


def _gap(own: LogProbs, held: LogProbs) -> float:
    return compare(own, {"server": held})[0].mean


def _served_adapter(server: ProbedServer, options: argparse.Namespace) -> str | None:
    """Return the name under which requests get the adapter; None: the server lists none."""
    if options.adapter is None:
        return None
    names = server.adapters
    if options.adapter_name is not None:
        return str(options.adapter_name)
    if len(names) > 1 and options.adapter.name not in names:
        raise ValueError(f"{server.url} lists the adapters {', '.join(names)}: choose with --adapter-name.")
    return options.adapter.name if options.adapter.name in names else next(iter(names), None)
