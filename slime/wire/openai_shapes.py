"""JSON of OpenAI's API that several of our servers write: errors, log-probs, the list of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def error_json(
    message: str, kind: str = "invalid_request_error", *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def log_prob_entries(
    decode: Callable[[list[int]], str], ids: Iterable[int], log_probs: Iterable[float]
) -> list[dict[str, Any]]:
    """Return one entry for each token, including the one that ended the response; `token_id` is ours."""
    out = []
    for token, log_prob in zip(ids, log_probs, strict=True):
        text = decode([token])
        entry = {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        out.append({**entry, "token_id": token})
    return out


def model_list(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the body of /v1/models; `more`: further fields of every model."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "slime", **more} for name in names]
    return {"object": "list", "data": models}
