"""Ends a run: closes every part of it, and logs every error on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


class Closing:
    """A context manager that runs all its steps at the end, the last added first, even if some of them fail.

    The first failure becomes the run's error, unless it has one already; all others are logged.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def __enter__(self) -> Closing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = cause
        for step in reversed(self._steps):
            try:
                step()
            except Exception as failure:
                if first is None:
                    first = failure
                elif str(failure) != str(first):  # a part that could not start says once more why
                    logger.warning(
                        "Another error while the run ended: %s: %s", type(failure).__name__, failure
                    )
        if cause is None and first is not None:
            raise first
