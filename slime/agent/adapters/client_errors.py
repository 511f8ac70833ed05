"""Errors sent to clients, and checks of request fields; each protocol writes errors in its own JSON."""

from __future__ import annotations

from typing import Any

from slime.agent.engine_access import PolicyDown
from slime.agent.rendering import TemplateRefused
from slime.agent.session import (
    BadConversation,
    ContextExhausted,
    SessionClosed,
    TokenBudgetUsed,
    TurnBudgetUsed,
)
from slime.liveness.waits import WaitTimeout
from slime.rollout.generation.turn_gate import RolloutEnded
from slime.utils.errors import EngineAnswerError
from slime.utils.http_utils import HttpError


class ApiError(Exception):
    """An error response. `retry` False: a header asks clients not to send the request again.

    `kind` is invalid, auth, not_found, too_large, context, budget, closed, engine, ours or unknown_answer.
    """

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param, self.retry = status, kind, message, param, retry

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry else {"x-should-retry": "false"}


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid", message, param=param, retry=False)


def api_error(error: Exception) -> ApiError:
    """Return the error response for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextExhausted):
        return ApiError(400, "context", str(error), param="messages", retry=False)
    if isinstance(error, (TurnBudgetUsed, TokenBudgetUsed)):
        return ApiError(429, "budget", str(error), retry=False)
    if isinstance(error, (SessionClosed, RolloutEnded)):
        return ApiError(503, "closed", str(error), retry=False)
    if isinstance(error, (BadConversation, TemplateRefused)):
        return invalid(str(error), "messages")
    if isinstance(error, HttpError) and 400 <= error.status < 500:
        return invalid(f"the engine refuses the request: {error.body[:500]}")
    if isinstance(error, (PolicyDown, HttpError, EngineAnswerError, WaitTimeout)):
        return ApiError(502, "engine", f"the engines gave no response: {error}"[:500])
    if isinstance(error, ValueError):  # sampling parameters that the engines' protocol does not have
        return invalid(str(error)[:500])
    return ApiError(500, "ours", f"{type(error).__name__}: {error}"[:500])


def want(value: Any, kinds: type | tuple[type, ...], name: str, what: str) -> Any:
    """Return `value`, which must be of one of `kinds`; a boolean is no number."""
    wrong_bool = isinstance(value, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,))
    if wrong_bool or not isinstance(value, kinds):
        raise invalid(f"Invalid type for '{name}': expected {what}, got {type(value).__name__}.", name)
    return value


def maybe(given: dict[str, Any], name: str, kinds: type, what: str) -> Any:
    """Return an optional field; None: it is absent or null."""
    value = given.get(name)
    return None if value is None else want(value, kinds, name, what)


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number of the body, which must be within a range; None: it is absent."""
    value = body.get(name)
    if value is None:
        return None
    want(value, (int, float), name, "a number")
    if not low <= value <= high:
        raise invalid(f"Invalid '{name}': {value} is not between {low:g} and {high:g}.", name)
    return float(value)


def count(body: dict[str, Any], name: str, low: int = 1, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    want(value, int, name, "an integer")
    if value < low:
        raise invalid(f"Invalid '{name}': integer below minimum value. Expected a value >= {low}.", name)
    if high is not None and value > high:
        raise invalid(f"Invalid '{name}': integer above maximum value. Expected a value <= {high}.", name)
    return int(value)


def check_stops(given: list[Any], name: str) -> None:
    """Refuse empty stop strings, which would end every response at once."""
    for place, text in enumerate(given):
        if not want(text, str, f"{name}[{place}]", "a string"):
            raise invalid(f"Invalid '{name}[{place}]': empty string. Expected at least one character.", name)
