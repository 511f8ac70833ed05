"""The tracer: it records how long each part of a step took, as `Span` rows of the run's record.

The driver, the trainer ranks and the weight push each hold a `Tracer`. Spans of a sample (generation, reward)
travel on the sample as plain data until the sample is recorded. `slime trace` and the dashboard's timeline
read the rows.

Lanes are `loop` (what the driver does), `engine-N` (responses, by the engine that generated them; `engines`
where a router hides which), `episodes` (custom generate functions), `reward`, `trainer-N`, `push` (parts of a
weight push) and `waits: OWNER`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from slime.liveness import waits
from slime.utils.types import Sample

LOOP, ENGINES, EPISODES, REWARD, TRAINER = "loop", "engines", "episodes", "reward", "trainer-{rank}"
PUSH, WAITS = "push", "waits: {owner}"
_OF_THE_LOOP = ("run", "start of the run")  # owners whose waits are in the lane of the loop already
_MAX_WAITS = 200  # the longest waits of one process in one step
_LANE_OF_SAMPLE_SPAN = {
    "generate": ENGINES,
    "generate_function": EPISODES,
    "reward_model": REWARD,
    "group_reward_model": REWARD,
}
_SampleSpan = dict[str, Any]  # name, start, end, about

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Span:
    """A named stretch of time in one lane of one step.

    Example: Span(12, "loop", "generating", 1754820000.1, 1754820004.3, {}). Times are seconds since 1970.
    """

    rollout_id: int
    lane: str
    name: str
    start: float
    end: float
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Tracer:
    """Collects the spans of one process. `drain` fills in fields that a span does not set."""

    def __init__(self, lane: str = "", rollout_id: int = -1):
        self._lane, self._rollout_id = lane, rollout_id
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, name: str, rollout_id: int | None = None, **about: Any) -> Iterator[Span]:
        """Record the body as a span, also when it raises."""
        step = self._rollout_id if rollout_id is None else rollout_id
        span = Span(step, self._lane, name, time.time(), 0.0, about)
        started = time.monotonic()
        try:
            yield span
        finally:
            span.end = span.start + time.monotonic() - started
            self._spans.append(span)

    def drain(self, **changes: Any) -> list[Span]:
        """Return the spans since the last call, with these fields (`lane`, `rollout_id`) set."""
        spans, self._spans = self._spans, []
        return [replace(span, **changes) for span in spans]


class trace_span:  # used like a function: with trace_span(sample, "reward_model") as span
    """A span of a sample, or of each sample in a (nested) list; it never raises into its caller.

    `span.update({...})` and `span.set(key, value)` add attributes.
    """

    def __init__(
        self, target: Any, name: str, attrs: Mapping[str, Any] | None = None, *, record_error: bool = True
    ):
        self._target, self._name, self._record_error = target, name, record_error
        self._attrs: dict[str, Any] = dict(attrs or {})
        self._start = 0.0

    def update(self, attrs: Mapping[str, Any] | None = None, **more: Any) -> trace_span:
        self._attrs.update(attrs or {}, **more)
        return self

    def set(self, key: str, value: Any) -> trace_span:
        self._attrs[key] = value
        return self

    update_attrs, set_attr = update, set  # names that plug-ins of THUDM/slime use

    def __enter__(self) -> trace_span:
        self._start = time.time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self._record_error:
            self._attrs["error"] = f"{type(error).__name__}: {error}"
        add_sample_span(self._target, self._name, self._start, self._attrs)


def add_sample_span(target: Any, name: str, start: float, attrs: Mapping[str, Any]) -> None:
    """Add a span that ends now to a sample, a carrier, or each of them in a (nested) list."""
    try:
        end = time.time()
        for carrier in carriers(target):
            # Dumps of samples accept plain types only.
            about = json.loads(json.dumps(attrs, default=str)) if attrs else {}
            if carrier.get("attempt"):
                about["attempt"] = carrier["attempt"]
            carrier["spans"].append({"name": name, "start": start, "end": end, "about": about})
    except Exception:  # tracing must not fail what it observes
        logger.debug("The span %s could not be recorded.", name, exc_info=True)


def carriers(target: Any) -> list[dict[str, Any]]:
    """Return the dicts that hold the spans of a target; empty for a target that cannot be traced."""
    if isinstance(target, Sample):
        return [carrier_of(target)]
    if isinstance(target, (list, tuple)):
        found = [carrier for item in target for carrier in carriers(item)]
        return list({id(carrier): carrier for carrier in found}.values())
    carrier = getattr(target, "carrier", None)  # a TraceHandle of trace_utils
    return [carrier] if carrier is not None else []


def carrier_of(sample: Sample) -> dict[str, Any]:
    """Return the sample's spans, which are attached when the first one is recorded."""
    carrier: dict[str, Any] = vars(sample).setdefault("trace", {})
    carrier.setdefault("spans", [])
    return carrier


def sample_spans(sample: Sample) -> list[_SampleSpan]:
    """Return the spans of a sample without attaching any; dumps of older releases have none."""
    found: list[_SampleSpan] = (vars(sample).get("trace") or {}).get("spans", [])
    return found


def spans_of_samples(rollout_id: int, samples: Iterable[Sample]) -> list[Span]:
    """Return when engines and rewards worked on each sample; a reward of a whole group is one span."""
    found: dict[tuple[str, str, float], Span] = {}
    for sample in samples:
        for span in sample_spans(sample):
            lane = _LANE_OF_SAMPLE_SPAN.get(span["name"])
            if lane is None:
                continue
            about = {"group": sample.group_index, **span["about"]}
            lane = about.pop("engine", None) or lane
            name = f"group {sample.group_index}"
            if not span["name"].startswith("group"):
                name, about = f"sample {sample.index}", {"sample": sample.index, **about}
            start = span["start"]
            found[lane, name, start] = Span(rollout_id, lane, name, start, span["end"], about)
    return list(found.values())


def spans_of_waits(rollout_id: int) -> list[Span]:
    """Return what this process waited for since the last call, except waits that have a lane already."""
    kept = [
        (wait, end)
        for wait, end in waits.drain_ended()
        if wait.owner not in _OF_THE_LOOP and waits.OF_ONE_REQUEST not in wait.name
    ]
    kept = sorted(kept, key=lambda entry: entry[0].started - entry[1])[:_MAX_WAITS]
    now, clock = time.time(), time.monotonic()
    return [
        Span(
            rollout_id,
            WAITS.format(owner=wait.owner),
            wait.name.replace(wait.target, "") if "://" in wait.target else wait.name,
            now - (clock - wait.started),
            end,
            {"for": waits.known_as(wait.target)} if wait.target else {},
        )
        for wait, end in kept
    ]


def write_spans(connection: sqlite3.Connection, spans: Iterable[Span]) -> None:
    """Insert the spans into the record."""
    connection.executemany(
        "INSERT INTO spans (rollout_id, lane, name, start, end, about) VALUES (?, ?, ?, ?, ?, ?)",
        [(s.rollout_id, s.lane, s.name, s.start, s.end, _as_json(s.about)) for s in spans],
    )


def _as_json(about: dict[str, Any]) -> str | None:
    return json.dumps(about, default=str) if about else None


def forget_spans(connection: sqlite3.Connection, from_rollout: int) -> None:
    """Delete the spans of steps that a resumed run repeats."""
    connection.execute("DELETE FROM spans WHERE rollout_id >= ?", (from_rollout,))
