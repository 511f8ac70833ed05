"""Parses /generate requests strictly into sequences, and writes responses in SGLang's format."""

import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.engines.embedded.request_images import ImagePrompt, ImageReader
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import Detokenizer
from slime.utils import top_p
from slime.utils.misc import encode_int32_meta_array
from slime.wire.protocol import SamplingParams, shown, wrong_token_id

FIELDS = (
    *("input_ids", "text", "image_data", "sampling_params", "return_logprob", "logprob_start_len"),
    *("stream", "rid", "top_logprobs_num", "return_sampling_mask", "return_routed_experts"),
)
MAX_SCORED_LOGITS = 1 << 30  # tokens x vocabulary of one scored input, which are in memory at once
MAX_SEQUENCES = 4096  # prompts x n of one request
MAX_STOPS, MAX_STOP_CHARACTERS = 1024, 1024  # all are searched after every token


class BadRequest(ValueError):
    """The client made a mistake; the HTTP status is 400."""


class RequestFailed(Exception):
    """The engine could not serve a valid request; holds the HTTP `status` and the reason."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def raise_failure(sequences: list[Sequence]) -> None:
    """Raise the error of the first failed sequence, as the response to the whole request."""
    for sequence in sequences:
        if sequence.failed and sequence.finish is not None:
            why = sequence.finish
            raise RequestFailed(why["status_code"], f"request {sequence.rid}: {why['message']}")


def seed_of_copy(seed: int, index: int) -> int:
    """Return the seed of one of the n samples of a request: they differ, and are still reproducible."""
    return (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of this engine for one request."""

    vocab_size: int
    context_len: int
    max_tokens: int  # of one request, prompt and output; less than the context when the KV pool is small
    eos_token_ids: frozenset[int]
    records_experts: bool = False


class RequestReader:
    """Turns the body of /generate into sequences. `seed` is the source of seeds for requests without one."""

    def __init__(
        self, limits: RequestLimits, detokenizer: Detokenizer, seed: int, images: ImageReader | None = None
    ):
        self.limits = limits
        self._images = images  # None: the model reads text only
        self.detokenizer = detokenizer
        self._random = random.Random(seed)

    def read(self, body: Mapping[str, Any]) -> tuple[list[Sequence], bool]:
        """Return the sequences (prompt-major, n per prompt), and whether the response is a list."""
        _refuse_other_fields(body)
        prompts, is_batch = self._prompts(body)
        pictured = self._pictured(prompts, body.get("image_data"), is_batch)
        samplings = _per_prompt("sampling_params", body, len(prompts), Mapping)
        read = [self._sampling(raw) for raw in samplings]
        _check_count(sum(sampling.n for sampling in read))
        stream, return_logprob = read_flag(body, "stream"), read_flag(body, "return_logprob")
        if stream and any(sampling.n > 1 for sampling in read):
            raise BadRequest("stream is true: it requires n = 1")
        return_experts = read_flag(body, "return_routed_experts")
        if return_experts and not self.limits.records_experts:
            raise BadRequest("return_routed_experts: start the engine with --enable-return-routed-experts")
        scored = _wants_score(body)
        num_top = self._num_top(body, scored)
        sequences = []
        for prompt, sampling, rid in zip(
            pictured, read, _per_prompt("rid", body, len(prompts), str), strict=True
        ):
            if scored:
                self._check_scored(prompt.ids, sampling, return_logprob)
            room, wanted = self.limits.max_tokens - len(prompt.ids), sampling.max_new_tokens
            wanted = room if wanted is None else min(wanted, room)
            rid = rid or secrets.token_hex(16)  # shared by all n samples: one abort ends them all
            for index in range(sampling.n):
                seed = sampling.sampling_seed
                seed = self._random.getrandbits(63) if seed is None else seed
                made = Sequence(
                    rid=rid,
                    prompt=prompt.ids,
                    sampling=sampling,
                    seed=seed_of_copy(seed, index),
                    max_new_tokens=wanted,
                    stop_ids=self._stop_ids(sampling),
                    return_logprob=return_logprob,
                    stream=stream,
                    return_experts=return_experts,
                    scored=scored,
                    num_top=num_top,
                    pictures=prompt if prompt.images else None,
                )
                sequences.append(made)
        return sequences, is_batch or len(sequences) > 1

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise BadRequest("give exactly one of input_ids and text")
        if ids is None:
            return [self.encode(text)], False
        is_batch = isinstance(ids, list) and ids != [] and isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        _check_count(len(prompts))
        for prompt in prompts:
            self._check_prompt(prompt)
        return prompts, is_batch

    def _pictured(self, prompts: list[list[int]], data: Any, is_batch: bool) -> list[ImagePrompt]:
        """Expand the images of prompts; `data` has a list of images for each prompt of a batch."""
        if self._images is None:
            if data:
                raise BadRequest("image_data: this engine's model reads text only")
            return [ImagePrompt(prompt) for prompt in prompts]
        given = data if is_batch and data is not None else [data] * len(prompts)
        if not isinstance(given, list) or len(given) != len(prompts):
            raise BadRequest("image_data of a batch must be a list of lists, one for each prompt")
        try:
            made = [self._images.read(prompt, one) for prompt, one in zip(prompts, given, strict=True)]
        except ValueError as error:
            raise BadRequest(str(error)) from error
        for prompt in made:
            self._check_prompt(prompt.ids)
        return made

    def encode(self, text: Any, *, special: bool = True, name: str = "text") -> list[int]:
        """Return the ids of a text; a text that cannot fit the context is refused before it is tokenised."""
        if not isinstance(text, str) or not text:
            raise BadRequest(f"{name} must be a string that is not empty")
        if self.detokenizer.tokenizer is None:
            raise BadRequest(f"{name} needs a tokenizer and the model folder has none: send token ids")
        self._check_length(len(text) / self.detokenizer.longest_token)
        try:
            prompt = self.detokenizer.encode(text, special=special)
        except (TypeError, ValueError, UnicodeError) as error:  # half a character, say
            raise BadRequest(f"{name} cannot be split into tokens: {shown(str(error))}") from error
        self._check_prompt(prompt)
        return prompt

    def _check_length(self, least: float) -> None:
        """Check a length; `least`: the number of tokens, or a lower bound of it."""
        if least >= self.limits.max_tokens:
            short = self.limits.max_tokens < self.limits.context_len
            bound = "the size of the KV pool" if short else "the model's context length"
            raise BadRequest(
                f"The input ({least:.0f} tokens) is longer than {bound} ({self.limits.max_tokens} tokens)"
            )

    def _check_prompt(self, prompt: Any) -> None:
        if not isinstance(prompt, list) or not prompt:
            raise BadRequest("input_ids must be a non-empty list of integers, or a list of such lists")
        wrong = wrong_token_id(prompt, self.limits.vocab_size)
        if wrong is not None:
            raise BadRequest(
                f"input_ids has token id {wrong}: the vocabulary is 0..{self.limits.vocab_size - 1}"
            )
        self._check_length(len(prompt))

    def _sampling(self, raw: Any) -> SamplingParams:
        try:
            sampling = SamplingParams.from_json(raw)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        neutral: dict[str, Any] = {"repetition_penalty": 1.0, "json_schema": None}
        neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
        for name, value in neutral.items():
            if getattr(sampling, name) != value:
                raise BadRequest(f"{name} is not supported by the embedded engine; leave it at {value}")
        if any(i >= self.limits.vocab_size for i in sampling.stop_token_ids):
            raise BadRequest(
                f"stop_token_ids {shown(sampling.stop_token_ids)}: the vocabulary is "
                f"0..{self.limits.vocab_size - 1}"
            )
        if sampling.stop and self.detokenizer.tokenizer is None:
            raise BadRequest("stop needs a tokenizer and the model folder has none: use stop_token_ids")
        if len(sampling.stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in sampling.stop):
            raise BadRequest(
                f"stop takes up to {MAX_STOPS} strings of up to {MAX_STOP_CHARACTERS} characters each"
            )
        if sampling.min_new_tokens and len(self._stop_ids(sampling)) >= self.limits.vocab_size:
            raise BadRequest(
                "every token is a stop token, but min_new_tokens forbids them: none could be drawn"
            )
        return sampling

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos = frozenset() if sampling.ignore_eos else self.limits.eos_token_ids
        return eos | frozenset(sampling.stop_token_ids)

    def _num_top(self, body: Mapping[str, Any], scored: bool) -> int:
        """Return how many of the most likely ids a request asks for, with each token of its input."""
        number = body.get("top_logprobs_num") or 0
        most = self.limits.vocab_size if scored else 0
        if type(number) is not int or not 0 <= number <= most:
            raise BadRequest(
                f"top_logprobs_num is {shown(number)}: the embedded engine reports 0 to {most} of them"
                + ("" if scored else " unless logprob_start_len is 0, which scores the input")
            )
        return number

    def _check_scored(self, prompt: list[int], sampling: SamplingParams, return_logprob: bool) -> None:
        if sampling.max_new_tokens != 0 or not return_logprob:
            raise BadRequest(
                "logprob_start_len = 0 scores an input and generates nothing: it takes max_new_tokens = 0 "
                "and return_logprob"
            )
        if len(prompt) * self.limits.vocab_size > MAX_SCORED_LOGITS:
            longest = MAX_SCORED_LOGITS // self.limits.vocab_size
            raise BadRequest(
                f"logprob_start_len = 0: the embedded engine scores inputs of up to {longest} tokens"
            )


def _check_count(count: int) -> None:
    if count > MAX_SEQUENCES:
        raise BadRequest(
            f"the request asks for {shown(count)} responses (prompts x n): at most {MAX_SEQUENCES}"
        )


def _refuse_other_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name not in FIELDS and value is not None and value is not False:
            raise BadRequest(f"unknown field `{name[:64]}`, expected one of {FIELDS}")


def _per_prompt(name: str, body: Mapping[str, Any], count: int, kind: type) -> list[Any]:
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(v is None or isinstance(v, kind) for v in values):
        raise BadRequest(f"{name} must be one value, or a list of one per prompt ({count})")
    return values


def _wants_score(body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for log-probs of its input; only the whole input is supported."""
    start = body.get("logprob_start_len")
    if start not in (None, -1, 0) or isinstance(start, bool):
        raise BadRequest(
            f"logprob_start_len = {shown(start)} is not supported by the embedded engine: use 0 or -1"
        )
    return start == 0


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} is {shown(value)}: expected true or false")
    return bool(value)


def text_of(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} is {shown(value)}: expected a string that is not empty")
    return value


def answer_json(sequence: Sequence, detokenizer: Detokenizer) -> dict[str, Any]:
    """Return the response, or a cumulative stream chunk while `finish` is None."""
    finish = sequence.finish  # read first: a chunk must not report an end that is later than its tokens
    count = len(sequence.log_probs)
    output = sequence.output[:count]
    version = sequence.versions[-1][0] if sequence.versions else "default"
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": finish,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": version,
        "num_retractions": sequence.num_retractions,
        "completion_tokens": count,
        "cached_tokens": sequence.cached_tokens,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": time.time() - sequence.created,
    }
    if sequence.return_logprob:
        log_probs = sequence.log_probs[:count]
        inputs = zip(sequence.input_log_probs, sequence.prompt, strict=False)  # empty: it was not scored
        meta["input_token_logprobs"] = [[p, i, None] for p, i in inputs]
        if sequence.num_top:
            rows = sequence.input_top
            meta["input_top_logprobs"] = [None, *([[p, i, None] for p, i in row] for row in rows)]
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(log_probs, output, strict=True)]
        meta["output_token_logprobs_length"] = count
    if sequence.sampling.return_top_p_token_ids:
        meta |= top_p.to_meta(sequence.kept_ids[:count])
    if sequence.experts is not None:
        meta["routed_experts"] = encode_int32_meta_array(sequence.experts)
    if finish is not None:
        meta["weight_versions"] = sequence.spans(count)
    return {
        "text": detokenizer.answer_text(output, sequence.sampling, finish),
        "output_ids": output,
        "meta_info": meta,
    }
