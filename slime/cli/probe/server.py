"""Asks a server for log-probs: by SGLang's /generate where it has it, else by OpenAI's /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils import http_utils
from slime.utils.http_utils import HttpError
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

DEADLINE_S = 300.0
_ABSENT = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """A server under test. `info` None: it has OpenAI's endpoints alone. `adapter`: its name, if any."""

    url: str
    info: EngineInfo | None
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    adapter: str | None = None

    @property
    def _native(self) -> dict[str, Any]:
        return {"lora_path": self.adapter} if self.adapter and self.info is not None else {}

    @property
    def _route(self) -> dict[str, Any]:
        """Return the fields of an OpenAI request that choose the model and the adapter."""
        model = next(iter(self.models), "default")
        return {"model": model if self.info is not None else self.adapter or model, **self._native}

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens of a prompt but the first."""
        if self.info is not None:
            return await EngineControl(self.url, DEADLINE_S).score(ids, self._native)
        plain = {**self._route, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        refused = "it ignores prompt_logprobs and echo"
        for extra in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
            try:
                [choice, *_] = (await self._post("v1/completions", plain | extra))["choices"]
            except HttpError as error:
                refused = str(error)
                continue
            if scores := _prompt_scores(choice, ids):
                return scores
        raise ValueError(
            f"{self.url} returns no log-probs of a prompt ({refused}): the probe needs SGLang's /generate, "
            "or /v1/completions with prompt_logprobs (vLLM) or with echo and logprobs."
        )

    async def generate(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return sampled ids and their log-probs; empty: the server does not report ids."""
        if self.info is not None:
            sampling = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
            body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
            meta = (await self._post("generate", body | self._native))["meta_info"]
            entries = meta["output_token_logprobs"]
            return [entry[1] for entry in entries], [float(entry[0]) for entry in entries]
        body = {**self._route, "prompt": list(ids), "max_tokens": num_tokens, "temperature": 1.0}
        body |= {"logprobs": 1, "return_token_ids": True}
        [choice, *_] = (await self._post("v1/completions", body))["choices"]
        scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return list(choice.get("token_ids") or [])[: len(scores)], [float(score) for score in scores]

    async def count_tokens(self, text: str) -> int:
        """Return how many tokens the server's own tokenizer makes of a text."""
        body = {**self._route, "prompt": text, "max_tokens": 1}
        return int((await self._post("v1/completions", body))["usage"]["prompt_tokens"])

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, float | None]:
        """Return the number of prompt tokens of a chat, and the log-prob of its likeliest first token."""
        body = {"messages": list(messages), "max_tokens": 1, "temperature": 0.0, "logprobs": True}
        answer = await self._post("v1/chat/completions", self._route | body)
        entries = (answer["choices"][0].get("logprobs") or {}).get("content") or []
        return int(answer["usage"]["prompt_tokens"]), float(entries[0]["logprob"]) if entries else None

    async def _post(self, endpoint: str, body: Mapping[str, Any]) -> Any:
        return await http_utils.post(f"{self.url}/{endpoint}", body, max_retries=0, timeout_s=DEADLINE_S)


async def look_up(url: str) -> ProbedServer:
    """Return what a server says of itself."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        info = await EngineControl(url, DEADLINE_S).info()
    except HttpError as error:
        if error.status not in _ABSENT:
            raise ValueError(f"{url} cannot be probed: {error}") from error
        info = None
    try:
        models = (await http_utils.get(f"{url}/v1/models"))["data"]
    except HttpError as error:
        if info is None:
            raise ValueError(f"{url} has neither /server_info nor /v1/models: {error}") from error
        models = []
    # The embedded engine lists its adapter after its model, without naming a parent.
    adapters = [m["id"] for i, m in enumerate(models) if m.get("parent") or (i and info is not None)]
    names = tuple(m["id"] for m in models if m["id"] not in adapters)
    return ProbedServer(url, info, names, tuple(adapters))


def _prompt_scores(choice: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    """Read the log-probs of a prompt in either form; empty: there are none."""
    if rows := choice.get("prompt_logprobs"):
        rows = [{int(token): entry for token, entry in (row or {}).items()} for row in rows]
        entries = [row.get(token) for row, token in zip(rows[1:], ids[1:], strict=True)]
        return [float(e["logprob"] if isinstance(e, Mapping) else e) for e in entries if e is not None]
    scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return [float(s) for s in scores[1 : len(ids)]] if len(scores) > len(ids) and scores[0] is None else []
