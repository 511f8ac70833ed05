"""`slime trace RUN`: write where each step spent its time, for Perfetto or Chrome."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.cli.inspect import command, report_copy, run_parser
from slime.dashboard.run_folder import open_runs
from slime.dashboard.timeline import all_spans, packed
from slime.utils.files.run_file import no_run


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    run, *others = open_runs([options.run]).values()
    if others:
        raise ValueError(no_run(options.run))
    report_copy(run.path)
    with run.record() as connection:
        spans = all_spans(connection, *(options.steps or (None, None)))
    if not spans:
        raise ValueError(f"{options.run} has no spans" + ("" if options.steps is None else " of these steps"))
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
    return parser
