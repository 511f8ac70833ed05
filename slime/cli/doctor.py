"""`slime doctor`: looks at the flags, model, data and reward of a run without starting it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slime.cli.main import user_errors
from slime.cli.train import load_args


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run can start; 2: it cannot, and everything that keeps it from starting was printed."""
    with user_errors():
        args = load_args(argv)
    # Here, because it loads torch, which a misspelt flag does not need.
    from slime.arguments import explain_batch
    from slime.preflight import preflight

    print(explain_batch(args))
    report = preflight(args)
    for warning in args.warnings:
        print(f"warning: {warning}")
    print("\n".join(report.lines()))
    errors = len(report.of("error"))
    if errors:
        print(f"{errors} thing(s) keep this run from starting", file=sys.stderr)
        return 2
    print("ready: `slime train` with these flags can start")
    return 0
