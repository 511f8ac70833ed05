"""Why a turn of an episode is refused, and the outcome of the episode."""

from __future__ import annotations

from typing import Literal

from slime.utils.errors import EpisodeEnded

Outcome = Literal[
    "open", "completed", "truncated", "turn_budget", "token_budget", "context", "failed", "aborted"
]


class SessionError(RuntimeError):
    """A turn that is refused. `outcome` is the outcome of the episode."""

    outcome: Outcome = "failed"


class SessionClosed(SessionError):
    """The episode is over."""


class TurnBudgetUsed(SessionError, EpisodeEnded):
    outcome: Outcome = "turn_budget"


class TokenBudgetUsed(SessionError, EpisodeEnded):
    outcome: Outcome = "token_budget"


class ContextExhausted(SessionError, EpisodeEnded):
    """The prompt leaves no room for a response."""

    outcome: Outcome = "context"

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum")
        self.num_tokens, self.limit = num_tokens, limit


class BadConversation(ValueError):
    """Messages that no response can follow."""
