"""Where groups of this process are generated: here, or in rollout workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slime.rollout.prompt_groups import Group


class GroupRunner(Protocol):
    """Generates and scores groups in other processes."""

    async def run(self, group: Group, sampling_params: dict[str, Any], evaluation: bool) -> Group:
        """Return the finished group: new objects, the given ones stay as they are."""

    async def abort(self, scope: str) -> None:
        """Abort the requests that workers have sent for scopes of this name or prefix."""

    def change(self, name: str, value: object) -> None:
        """Change a setting of the run in all workers."""

    def know_engines(self, urls: Sequence[str]) -> None:
        """Tell all workers the addresses of the engines, after one has joined or left."""

    def close(self) -> None:
        """End all workers."""


_current: GroupRunner | None = None


def use(runner: GroupRunner | None) -> None:
    """Let `runner` generate all groups of this process; None: they are generated here."""
    global _current
    _current = runner


def current() -> GroupRunner | None:
    return _current
