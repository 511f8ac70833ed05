"""Bodies of OpenAI's requests, read into those of /generate; what the engine cannot do is refused by name."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.engines.embedded.generate_json import (
    MAX_SEQUENCES,
    BadRequest,
    RequestReader,
    read_flag,
    seed_of_copy,
)
from slime.engines.embedded.text import Detokenizer
from slime.wire.protocol import shown

_MAX_TOKENS = 16  # of a completion that names no limit, as in OpenAI's API
# Theirs -> ours, where the names differ; of two that mean the same the later one wins.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "skip_special_tokens"),
    *("spaces_between_special_tokens", "custom_params"),
)
_READ = (
    *("model", "messages", "prompt", "n", "stream", "stream_options", "logprobs", "tools", "rid"),
    *("chat_template_kwargs", "continue_final_message", "lora_path"),
)
# Fields that ask for nothing here.
_IGNORED = (
    *("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier"),
    *("prompt_cache_key", "reasoning_effort", "verbosity", "separate_reasoning", "stream_reasoning"),
)
_KNOWN = frozenset((*_READ, *_IGNORED, *_SAME, *_RENAMED))
# Fields that are served at these values alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `body` is that of /generate, with each prompt `n` times."""

    body: dict[str, Any]
    is_chat: bool
    model: str
    n: int
    stream: bool
    include_usage: bool
    log_probs: bool


class OpenAIReader:
    """Reads requests; text becomes tokens on `threads`, since a long one takes a while."""

    def __init__(self, reader: RequestReader, threads: Executor, model: str):
        self._reader, self._threads, self._model = reader, threads, model

    @property
    def detokenizer(self) -> Detokenizer:
        return self._reader.detokenizer

    async def chat(self, body: dict[str, Any]) -> Asked:
        messages, images = _messages(body.get("messages"))
        log_probs = read_flag(body, "logprobs")
        ids = await self._apart(lambda: self._rendered(messages, body))
        asked = self._asked(body, [ids], is_chat=True, log_probs=log_probs)
        if images:
            asked.body["image_data"] = [images] * asked.n
        return asked

    async def completions(self, body: dict[str, Any]) -> Asked:
        given = body.get("logprobs")
        if given is not None and (type(given) is not int or given not in (0, 1)):
            raise BadRequest(
                f"logprobs is {shown(given)}: of each token its own log-prob is known; use 0 or 1"
            )
        prompts = await self._apart(lambda: self._prompts(body.get("prompt")))
        body = {"max_tokens": _MAX_TOKENS, **body}
        return self._asked(body, prompts, is_chat=False, log_probs=given is not None)

    async def _apart(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _prompts(self, given: Any) -> list[list[int]]:
        """A text, ids, or a list of either."""
        several = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
        if len({type(one) for one in several}) > 1:
            raise BadRequest("prompt must be a text, a list of token ids, or a list of either kind")
        return [one if isinstance(one, list) else self._reader.encode(one, name="prompt") for one in several]

    def _rendered(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        tokenizer = self.detokenizer.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise BadRequest(
                "messages need a chat template, and the model folder has none: use /v1/completions"
            )
        options, tools = body.get("chat_template_kwargs") or {}, body.get("tools")
        continues = read_flag(body, "continue_final_message")
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise BadRequest("chat_template_kwargs must be an object")
        if tools is not None and not isinstance(tools, list):
            raise BadRequest("tools must be a list")
        options = {
            **options,
            "tools": tools or None,
            "tokenize": False,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        try:
            text: str = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template raises what it likes
            why = shown(f"{type(error).__name__}: {error}")
            raise BadRequest(f"the model's chat template does not take these messages: {why}") from error
        return self._reader.encode(text, special=False, name="messages")

    def _asked(
        self, body: dict[str, Any], prompts: list[list[int]], *, is_chat: bool, log_probs: bool
    ) -> Asked:
        _refuse_others(body)
        model, options = body.get("model") or self._model, body.get("stream_options") or {}
        if not isinstance(model, str) or not isinstance(options, dict):
            raise BadRequest("model must be a string, and stream_options an object")
        n = 1 if body.get("n") is None else body["n"]
        if type(n) is not int or not 1 <= n * len(prompts) <= MAX_SEQUENCES:
            raise BadRequest(
                f"n is {shown(n)}: expected an integer from 1 to {MAX_SEQUENCES}, prompts x n too"
            )
        sampling = _sampling(body)
        seed = sampling.get("sampling_seed")
        if seed is not None and type(seed) is not int:
            raise BadRequest(f"seed is {shown(seed)}: expected an integer")
        seeds = [None if seed is None else seed_of_copy(seed, index) for index in range(n)]
        stream = read_flag(body, "stream")
        native = {
            "input_ids": [prompt for prompt in prompts for _ in range(n)],
            "sampling_params": [{**sampling, "sampling_seed": one} for _ in prompts for one in seeds],
            "return_logprob": True,
            "stream": stream,
            "rid": body.get("rid"),
            "lora_path": body.get("lora_path"),
        }
        return Asked(native, is_chat, model, n, stream, read_flag(options, "include_usage"), log_probs)


def _refuse_others(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in _KNOWN or value is None or value is False:
            continue
        if name not in _NEUTRAL:
            raise BadRequest(f"unknown field `{name[:64]}`: the embedded engine does not serve it")
        if value not in _NEUTRAL[name]:
            raise BadRequest(f"{name} = {shown(value)} is not supported by the embedded engine")


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters in the engines' words; a chat without a limit goes to the end of the context."""
    ours = {**{name: name for name in _SAME}, **_RENAMED}
    found = {name: body[theirs] for theirs, name in ours.items() if body.get(theirs) is not None}
    return {"max_new_tokens": None, **found}


def _messages(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as templates take them, and the addresses of the images in them."""
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list of messages, and not empty")
    images: list[str] = []
    messages = []
    for place, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{place}] must be an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            content = _content(content, place, images)
        elif content is not None and not isinstance(content, str):
            raise BadRequest(f"messages[{place}].content must be a string or a list of parts")
        message = {**message, "content": "" if content is None else content}
        if message.get("tool_calls"):
            message["tool_calls"] = _calls(message["tool_calls"], place)
        messages.append(message)
    return messages, images


def _calls(given: Any, place: int) -> list[Any]:
    """Tool calls with their arguments as objects, which templates take; clients send them as text."""
    calls = []
    for call in given if isinstance(given, list) else [None]:
        function: Any = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise BadRequest(f"messages[{place}].tool_calls must be a list of objects with a function")
        arguments: Any = function.get("arguments")
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _content(parts: list[Any], place: int, images: list[str]) -> str | list[dict[str, Any]]:
    """The text of a message's parts, or the parts where images are among them."""
    out: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        part = part if isinstance(part, dict) else {}
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            out.append({"type": "text", "text": part["text"]})
        elif part.get("type") == "image_url" and isinstance(url, str):
            images.append(url)
            out.append({"type": "image"})
        else:
            raise BadRequest(f"messages[{place}].content[{number}] must be a text or an image_url with a url")
    if all(part["type"] == "text" for part in out):
        return "\n".join(part["text"] for part in out)
    return out
