"""Sentences for whoever watches a run: what was measured, what it means, which flag helps; once per cause."""

import logging

logger = logging.getLogger(__name__)


class Hints:
    """One per trainer rank and run. All ranks find the same; those of the first reach the driver's log."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}  # the text by cause
        self._new: list[str] = []

    def tell(self, cause: str, text: str) -> None:
        """Log `text` unless something was told about `cause` before."""
        if cause in self.told:
            return
        self.told[cause] = text
        self._new.append(text)
        logger.warning("%s", text)

    def take(self) -> list[str]:
        """What was told since the last call."""
        taken, self._new = self._new, []
        return taken
