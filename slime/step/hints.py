"""Sentences for whoever watches a run: what was measured, what it means, which flag helps; once per cause."""

import logging

logger = logging.getLogger(__name__)


class Hints:
    """One per trainer rank and run. All ranks find the same; those of the first reach the driver's log."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}  # the text by cause
        self._num_taken = 0

    def tell(self, cause: str, text: str) -> None:
        """Log `text` unless something was told about `cause` before."""
        if cause not in self.told:
            self.told[cause] = text
            logger.warning("%s", text)

    def take(self) -> list[str]:
        """What was told since the last call."""
        taken = list(self.told.values())[self._num_taken :]
        self._num_taken = len(self.told)
        return taken
