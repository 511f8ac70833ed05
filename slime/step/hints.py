"""Hints in the log of a run: what was measured, what it means and which flag helps; once per cause."""

import logging

logger = logging.getLogger(__name__)


class Hints:
    """Collects hints on one trainer rank. All ranks find the same hints; the driver logs those of rank 0."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # the text by cause
        self._num_drained = 0

    def log_once(self, cause: str, text: str) -> None:
        """Log `text`, unless a hint about `cause` was logged before."""
        if cause not in self.texts:
            self.texts[cause] = text
            logger.warning("%s", text)

    def drain(self) -> list[str]:
        """Return the hints that were added since the last call."""
        drained = list(self.texts.values())[self._num_drained :]
        self._num_drained = len(self.texts)
        return drained
