"""OpenAI's endpoints of the embedded engine, translated to and from /generate requests.

A stream sends every choice in one piece, once all are finished. Tool calls and reasoning stay text.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from slime.engines.embedded.engine_thread import EngineLoop
from slime.engines.embedded.generate_json import BadRequest, RequestReader, raise_failure, read_flag
from slime.engines.embedded.sequence import Sequence
from slime.wire.openai_shapes import log_prob_entries
from slime.wire.protocol import shown

# Parses the body of /generate, and refuses requests that cannot be served now.
Accept = Callable[[dict[str, Any]], Awaitable[tuple[list[Sequence], bool]]]

_MAX_TOKENS = 16  # default limit of a completion, as in OpenAI's API
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "n"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "skip_special_tokens"),
    *("spaces_between_special_tokens", "custom_params"),
)
# OpenAI's sampling parameters -> ours; of two synonyms the later one wins.
_SAMPLING = {
    **{name: name for name in _SAME},
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
# Fields that are read below, and fields without an effect here.
_OTHERS = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "logprobs", "tools", "rid"),
        *("chat_template_kwargs", "continue_final_message", "lora_path"),
        *("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier"),
        *("prompt_cache_key", "reasoning_effort", "verbosity", "separate_reasoning", "stream_reasoning"),
    )
)
# Fields that are served at these values alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
}


class OpenAIApi:
    """Handlers of /v1/chat/completions and /v1/completions; long texts become tokens on `threads`."""

    def __init__(
        self, loop: EngineLoop, reader: RequestReader, threads: Executor, model: str, accept: Accept
    ):
        self._loop, self._reader, self._threads = loop, reader, threads
        self._model, self._accept = model, accept

    async def chat(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        messages, images = _messages(body.get("messages"))
        in_thread = asyncio.get_running_loop().run_in_executor
        prompt = await in_thread(self._threads, self._rendered, messages, body)
        native = {"input_ids": [prompt], "image_data": [images] if images else None}
        return await self._serve(body, native, is_chat=True, log_probs=read_flag(body, "logprobs"))

    async def completions(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        log_probs = body.get("logprobs")
        if log_probs not in (None, 0, 1):
            raise BadRequest(
                f"logprobs is {shown(log_probs)}: only the sampled token's log-prob is known; use 0 or 1"
            )
        in_thread = asyncio.get_running_loop().run_in_executor
        prompts = await in_thread(self._threads, self._prompts, body.get("prompt"))
        body = {"max_tokens": _MAX_TOKENS, **body}
        return await self._serve(body, {"input_ids": prompts}, is_chat=False, log_probs=log_probs is not None)

    def _prompts(self, given: Any) -> list[list[int]]:
        """Read a text, token ids, or a list of either."""
        several = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
        return [one if isinstance(one, list) else self._reader.encode(one, name="prompt") for one in several]

    def _rendered(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        tokenizer = self._reader.detokenizer.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise BadRequest(
                "messages need a chat template, and the model folder has none: use /v1/completions"
            )
        continues = read_flag(body, "continue_final_message")
        try:
            options = {
                **(body.get("chat_template_kwargs") or {}),
                "tools": body.get("tools") or None,
                "tokenize": False,
                "add_generation_prompt": not continues,
                "continue_final_message": continues,
            }
            text: str = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may raise anything
            why = shown(f"{type(error).__name__}: {error}")
            raise BadRequest(f"the model's chat template refuses these messages: {why}") from error
        return self._reader.encode(text, special=False, name="messages")

    async def _serve(
        self, body: dict[str, Any], native: dict[str, Any], *, is_chat: bool, log_probs: bool
    ) -> web.StreamResponse:
        """Respond to a request whose prompts are in `native`, the body of /generate."""
        _refuse_others(body)
        stream, options = read_flag(body, "stream"), body.get("stream_options") or {}
        model = body.get("model") or self._model
        if not isinstance(model, str) or not isinstance(options, dict):
            raise BadRequest("model must be a string, and stream_options an object")
        # A chat without a limit may use the whole context.
        sampling = {ours: body[name] for name, ours in _SAMPLING.items() if body.get(name) is not None}
        native |= {"sampling_params": {"max_new_tokens": None, **sampling}, "return_logprob": True}
        native |= {"rid": body.get("rid"), "lora_path": body.get("lora_path")}
        sequences, _ = await self._accept(native)
        await self._loop.finish(sequences)
        raise_failure(sequences)
        kind = "chat.completion" if is_chat else "text_completion"
        prompt_tokens = sum(len(sequence.prompt) for sequence in sequences[:: sequences[0].sampling.n])
        made = sum(len(sequence.output) for sequence in sequences)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }
        answer: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{sequences[0].rid}",
            "object": f"{kind}.chunk" if stream and is_chat else kind,
            "created": int(time.time()),
            "model": model,
            "metadata": {"weight_version": sequences[0].versions[-1][0]},
        }
        answer["choices"] = [
            {"index": index, **self._choice(sequence, log_probs, is_chat=is_chat, stream=stream)}
            for index, sequence in enumerate(sequences)
        ]
        if not stream:
            return web.json_response({**answer, "usage": usage})
        events = [answer]
        if read_flag(options, "include_usage"):
            events.append({**answer, "choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")

    def _choice(self, sequence: Sequence, log_probs: bool, *, is_chat: bool, stream: bool) -> dict[str, Any]:
        finish, sampling, detokenizer = sequence.finish or {}, sequence.sampling, self._reader.detokenizer
        text = detokenizer.answer_text(sequence.output, sampling, finish)
        message = {"delta" if stream else "message": {"role": "assistant", "content": text}}
        scores = None
        if log_probs:
            ids, values = sequence.output, sequence.log_probs
            entries = log_prob_entries(lambda one: detokenizer.decode(one, sampling), ids, values)
            scores = {"content": entries} if is_chat else _as_columns(entries)
        return {
            **(message if is_chat else {"text": text}),
            "logprobs": scores,
            "finish_reason": finish["type"],
        }


def _as_columns(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return log-probs in the shape of completions."""
    tokens = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "token_ids": [entry["token_id"] for entry in entries],
        "top_logprobs": None,
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }


def _refuse_others(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in _SAMPLING or name in _OTHERS or value is None or value is False:
            continue
        if name not in _NEUTRAL:
            raise BadRequest(f"unknown field `{name[:64]}`: the embedded engine does not serve it")
        if value not in _NEUTRAL[name]:
            raise BadRequest(f"{name} = {shown(value)} is not supported by the embedded engine")


def _messages(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages as templates take them, and the addresses of the images in them."""
    images: list[str] = []
    try:
        messages = [_message(one, images) for one in given]
    except (TypeError, KeyError, AttributeError):
        messages = []
    if not messages:
        raise BadRequest(
            "messages must be a list of objects with a role; their content is text, or a list of parts that "
            "are a text or an image_url with a url; tool_calls are objects with a function"
        )
    return messages, images


def _message(given: Any, images: list[str]) -> dict[str, Any]:
    content = given.get("content")
    if isinstance(content, list):
        content = _content(content, images)
    message = {**given, "role": given["role"], "content": content or ""}
    if given.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": _function(call["function"])} for call in given["tool_calls"]
        ]
    return message


def _function(given: Any) -> dict[str, Any]:
    """Return a called function with its arguments as an object, which templates take; clients send text."""
    try:
        return {**given, "arguments": json.loads(given["arguments"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {**given}


def _content(parts: list[Any], images: list[str]) -> str | list[dict[str, Any]]:
    """Return the text of a message's parts, or the parts where images are among them."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "image_url":
            images.append(part["image_url"]["url"])
            out.append({"type": "image"})
        elif part["type"] == "text":
            out.append({"type": "text", "text": part["text"]})
        else:
            raise KeyError(part["type"])
    if all(part["type"] == "text" for part in out):
        return "\n".join(part["text"] for part in out)
    return out
