"""What could not be written to a record, as on a full disk: counted, and noted there once it works again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable

ROLLOUTS, EVENTS, STEPS = "missed_rollouts", "missed_events", "missed_steps"


class Missed:
    """The counts of all starts. `steps`: rollouts to train on whose samples are not in the record."""

    def __init__(self, connection: sqlite3.Connection):
        known = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        self.rollouts, self.events = int(known.get(ROLLOUTS, 0)), int(known.get(EVENTS, 0))
        self.steps = missed_steps(known.get)

    def note(self, connection: sqlite3.Connection) -> None:
        """Writes them; the caller has begun a transaction."""
        for key, value in ((ROLLOUTS, self.rollouts), (EVENTS, self.events), (STEPS, sorted(self.steps))):
            if value:
                connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def missed_steps(meta: Callable[[str], str | None]) -> set[int]:
    """Steps of which a record notes that their samples could not be written."""
    return set(json.loads(meta(STEPS) or "[]"))
