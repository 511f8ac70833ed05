"""Sentences for whoever watches a run: what was measured, what it means,
which flag helps. Each cause is told once.
"""

import logging

logger = logging.getLogger(__name__)


class Hints:
    """One per trainer rank and run. All ranks find the same; those of the first reach the driver's log."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._new: list[str] = []

    def tell(self, cause: str, text: str) -> None:
        """Log `text` unless something was told about `cause` before."""
        if cause in self._told:
            return
        self._told.add(cause)
        self._new.append(text)
        logger.warning("%s", text)

    def take(self) -> list[str]:
        """What was told since the last call."""
        taken, self._new = self._new, []
        return taken
