"""Collects all waits of a run in one table, which the driver writes to `RUN/waits.json` every second.

`slime status` and the dashboard read that file. A row is overdue when its deadline has passed; a row without
a deadline is bounded by the heartbeat of its target.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slime.liveness import phases, waits

WAITS_FILE = "waits.json"
SIGN_OF_LIFE = "a sign of life"  # how the waits of the heartbeat watch start
_MAX_ROWS = 200
_FIRST = (phases.START, phases.RUN, "driver", "rollout")  # owners with whom a chain of causes starts
_CHAIN_LINES = 16


@dataclass(frozen=True, slots=True)
class WaitRow:
    """One wait: its owner, its target and its start. `count`: similar waits, of which this is the oldest.

    Example: WaitRow("driver", "trainer-0.train and 1 more", "trainer-0, trainer-1", 1.7e9, None).
    """

    owner: str
    what: str
    target: str
    since: float  # seconds since 1970
    deadline_s: float | None
    count: int = 1

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.since)

    def is_overdue(self, now: float) -> bool:
        return self.deadline_s is not None and self.age_s(now) > self.deadline_s

    def describe(self, now: float) -> str:
        many = f" ({self.count} of them)" if self.count > 1 else ""
        whom = f" for {self.target}" if self.target and not self.what.startswith(self.target) else ""
        deadline = f", deadline {self.deadline_s:.0f} s" if self.deadline_s is not None else ""
        overdue = " OVERDUE" if self.is_overdue(now) else ""
        waited = f"{self.age_s(now):.0f} s"
        return f"{self.owner} waits{whom}: {self.what}{many}, for {waited}{deadline}{overdue}"


def row_of(owner: str, what: str, target: str, age_s: float, deadline_s: float | None) -> WaitRow:
    """Return a wait as a row; addresses of engines become their names."""
    finite = deadline_s if deadline_s is None or math.isfinite(deadline_s) else None
    return WaitRow(owner, what, waits.known_as(target), time.time() - age_s, finite)


def rows_of_this_process(found: Iterable[waits.Wait] | None = None) -> list[WaitRow]:
    """Return rows of the given waits of this process; None: of those in progress."""
    return [
        row_of(wait.owner, wait.name, wait.target, wait.age_s, wait.deadline_s)
        for wait in (waits.active() if found is None else found)
    ]


def collapse(rows: Iterable[WaitRow]) -> list[WaitRow]:
    """Merge requests of the same kind into one row with the age of the oldest; oldest first."""
    kinds: dict[tuple[str, str, str], WaitRow] = {}
    for row in sorted(rows, key=lambda row: row.since):
        kind = (row.owner, row.what.partition(waits.OF_ONE_REQUEST)[0], row.target)
        known = kinds.get(kind)
        kinds[kind] = replace(known, count=known.count + 1) if known is not None else row
    return list(kinds.values())


def chain_of_causes(rows: Sequence[WaitRow]) -> list[str]:
    """Return who waited for whom, from the run itself to processes that wait for nobody."""
    now, lines, seen = time.time(), list[str](), set[str]()
    owners = list(_FIRST)
    while owners and len(lines) < _CHAIN_LINES:
        owner = owners.pop(0)
        if owner in seen:
            continue
        seen.add(owner)
        for row in collapse(row for row in rows if row.owner == owner):
            lines.append(row.describe(now))
            owners += _targets(row, rows)
    silent = [row for row in collapse(rows) if row.owner not in seen and row.what.startswith(SIGN_OF_LIFE)]
    return lines[:_CHAIN_LINES] + [row.describe(now) for row in silent]


def _targets(row: WaitRow, rows: Sequence[WaitRow]) -> list[str]:
    if row.target == "the other ranks":
        return sorted({other.owner for other in rows if other.owner.startswith("trainer-")})
    return row.target.split(", ") if row.target else []


def write_table(run_dir: Path, rows: Iterable[WaitRow]) -> None:
    """Replace the file. A full disk costs this report, not the run."""
    kept = collapse(rows)[:_MAX_ROWS]
    text = json.dumps({"time": time.time(), "waits": [asdict(row) for row in kept]})
    path = run_dir / WAITS_FILE
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, path)


@dataclass(frozen=True, slots=True)
class WaitTable:
    """The table as a run wrote it at `time`, overdue rows first."""

    time: float
    rows: tuple[WaitRow, ...]

    @property
    def overdue(self) -> list[WaitRow]:
        return [row for row in self.rows if row.is_overdue(self.time)]

    @property
    def is_paused(self) -> bool:
        """Whether a user has paused the run between two steps."""
        return self.paused_since is not None

    @property
    def paused_since(self) -> float | None:
        """When a user paused the run, in seconds since 1970; None: it is not paused."""
        paused = (row.since for row in self.rows if row.owner == phases.RUN and row.what == phases.PAUSED)
        return next(paused, None)

    @property
    def silent(self) -> list[WaitRow]:
        """Processes that give no sign of life, and still have time to."""
        return [row for row in self.rows if row.what.startswith(SIGN_OF_LIFE) and row not in self.overdue]


def read_table(run_dir: Path) -> WaitTable | None:
    """Return the table that a run wrote last; None if there is none, or it cannot be read."""
    try:
        found = json.loads((run_dir / WAITS_FILE).read_text())
        written, rows = float(found["time"]), [WaitRow(**row) for row in found["waits"]]
        rows.sort(key=lambda row: (not row.is_overdue(written), row.since))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return WaitTable(written, tuple(rows))
