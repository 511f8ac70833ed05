"""`slime trace RUN`: write where each step spent its time, for Perfetto, Chrome or OpenTelemetry."""

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

from slime.cli.inspect import command, run_parser
from slime.dashboard.run_folder import RunFolder, open_runs
from slime.dashboard.timeline import all_spans, packed
from slime.utils.files.run_file import no_run

_BATCH = 2000  # spans in one request to a collector


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    run, *others = open_runs([options.run]).values()
    if others:
        raise ValueError(no_run(options.run))
    with run.record() as connection:
        spans = all_spans(connection, *(options.steps or (None, None)))
    if not spans:
        raise ValueError(f"{options.run} has no spans" + ("" if options.steps is None else " of these steps"))
    if options.otlp:
        return _send(run, spans, options.otlp)
    out = Path(options.out) if options.out else options.run / "trace.json"
    try:
        with out.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(chrome_events(spans)), "displayTimeUnit": "ms"}, file)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from None
    print(f"wrote {out}: {len(spans)} spans; open it at ui.perfetto.dev or chrome://tracing")
    return 0


def chrome_events(spans: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events: a process for each lane, and a thread for each row of overlapping spans."""
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
    """Return an OTLP/HTTP request as JSON; each step is one trace."""
    resource = {"attributes": [_attribute("service.name", "slime"), _attribute("run", name)]}
    scope = {"scope": {"name": "slime"}, "spans": [_otlp_span(run_id, span) for span in spans]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


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
            url, headers = address.rstrip("/") + "/v1/traces", {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30).close()
        except (urllib.error.URLError, ValueError) as error:
            print(f"error: --otlp {address}: {error}", file=sys.stderr)
            return 1
    print(f"sent {len(spans)} spans to {address}")
    return 0


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps; write 12 or 10-20")
    steps = int(first), int(last or first)
    if not steps[0] <= steps[1] < 1 << 63:  # the most that SQLite can hold
        raise argparse.ArgumentTypeError(f"{text!r} contains no step; write 12 or 10-20")
    return steps


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("trace", __doc__)
    parser.add_argument("--steps", type=_steps, metavar="A-B", help="only these steps; default: all")
    parser.add_argument("--out", metavar="FILE", help="file to write; default: RUN/trace.json")
    collector = "send to an OpenTelemetry collector (OTLP over HTTP) instead"
    parser.add_argument("--otlp", metavar="URL", help=collector)
    return parser
