"""Errors sent to clients; each protocol writes them in its own JSON."""

from __future__ import annotations

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
from slime.utils.errors import EngineResponseError
from slime.utils.http_utils import HttpError


class ApiError(Exception):
    """An error response. `retry` False: a header asks clients not to resend the request.

    `kind` is invalid, auth, not_found, too_large, context, budget, closed, engine or ours.
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
    if isinstance(error, (PolicyDown, HttpError, EngineResponseError, WaitTimeout)):
        return ApiError(502, "engine", f"the engines gave no response: {error}"[:500])
    if isinstance(error, ValueError):  # sampling parameters that the engines' protocol does not have
        return invalid(str(error)[:500])
    return ApiError(500, "ours", f"{type(error).__name__}: {error}"[:500])
