"""`slime trace RUN`: the spans of a run as a file for Perfetto or chrome://tracing, or for a collector."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.dashboard.run_folder import NotARun, RunFolder, open_runs
from slime.dashboard.timeline import all_spans, packed
from slime.record import RecordError
from slime.utils.files.run_file import no_run

_BATCH = 2000  # spans in one request to a collector
_MOST_STEPS = (1 << 63) - 1  # that SQLite can hold


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        run, *others = open_runs([options.run]).values()
        if others:
            raise NotARun(no_run(options.run))
        spans = _read(run, options.steps)
    except (NotARun, RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not spans:
        which = "" if options.steps is None else " of these steps"
        print(f"error: {options.run} has no spans{which}", file=sys.stderr)
        return 2
    if options.otlp:
        return _send(run, spans, options.otlp)
    out = Path(options.out) if options.out else options.run / "trace.json"
    try:
        with out.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(chrome_events(spans)), "displayTimeUnit": "ms"}, file)
    except OSError as error:
        print(f"error: --out {out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {out}: {len(spans)} spans; open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _read(run: RunFolder, steps: tuple[int, int] | None) -> list[dict[str, Any]]:
    with run.record() as connection:
        return all_spans(connection, *(steps or (None, None)))


def chrome_events(spans: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One process for each lane, and a thread of it for each row of spans that overlap."""
    lanes: dict[str, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: span["start"]):
        lanes.setdefault(span["lane"], []).append(span)
    begin = min(span["start"] for span in spans)
    for number, (lane, held) in enumerate(lanes.items(), 1):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": lane}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for span in packed(held)["spans"]:
            yield {
                "ph": "X",
                "name": span["name"],
                "cat": lane,
                "pid": number,
                "tid": span["row"],
                "ts": (span["start"] - begin) * 1e6,
                "dur": (span["end"] - span["start"]) * 1e6,
                "args": {"step": span["step"], **span["about"]},
            }


def otlp_request(name: str, run_id: str, spans: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A request of the OTLP/HTTP protocol with JSON; a step is one trace."""
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": [_attribute("service.name", "slime"), _attribute("run", name)]},
                "scopeSpans": [
                    {"scope": {"name": "slime"}, "spans": [_otlp_span(run_id, span) for span in spans]}
                ],
            }
        ]
    }


def _otlp_span(run_id: str, span: dict[str, Any]) -> dict[str, Any]:
    key = f"{run_id} {span['step']}"
    about = {"step": span["step"], "lane": span["lane"], **span["about"]}
    return {
        "traceId": hashlib.blake2b(key.encode(), digest_size=16).hexdigest(),
        "spanId": hashlib.blake2b(f"{key} {span}".encode(), digest_size=8).hexdigest(),
        "name": span["name"],
        "kind": 1,
        "startTimeUnixNano": str(int(span["start"] * 1e9)),
        "endTimeUnixNano": str(int(span["end"] * 1e9)),
        "attributes": [_attribute(name, value) for name, value in about.items()],
    }


def _attribute(name: str, value: object) -> dict[str, Any]:
    kind = {bool: "boolValue", int: "intValue", float: "doubleValue"}.get(type(value), "stringValue")
    plain = value if kind in ("boolValue", "doubleValue") else str(value)
    return {"key": name, "value": {kind: plain}}


def _send(run: RunFolder, spans: list[dict[str, Any]], address: str) -> int:
    name, run_id = (run.run.name, run.run.id) if run.run is not None else (run.key, run.key)
    for start in range(0, len(spans), _BATCH):
        body = json.dumps(otlp_request(name, run_id, spans[start : start + _BATCH])).encode()
        try:
            request = urllib.request.Request(
                address.rstrip("/") + "/v1/traces", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30):
                pass
        except (urllib.error.URLError, ValueError) as error:
            print(f"error: --otlp {address}: {error}", file=sys.stderr)
            return 1
    print(f"sent {len(spans)} spans to {address}")
    return 0


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; write 12 or 10-20")
    steps = int(first), int(last or first)
    if not steps[0] <= steps[1] <= _MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} holds no step; write 12 or 10-20")
    return steps


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=_steps, metavar="A-B", help="only these steps; default: all")
    parser.add_argument("--out", metavar="FILE", help="default: RUN/trace.json")
    parser.add_argument(
        "--otlp", metavar="URL", help="send to an OpenTelemetry collector (OTLP over HTTP) instead"
    )
    return parser
