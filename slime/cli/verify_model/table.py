"""The table that `slime verify-model` prints, a line as soon as it is known."""

from slime.cli.verify_model.compare import COLUMNS, EXACT, Verdict

_NAME, _WIDTH = 20, 11


class Table:
    """Prints one line per trainer, and keeps what failed for the end of the report."""

    def __init__(self) -> None:
        self.rows = 0
        self.problems: list[tuple[str, str]] = []  # (trainer and layout, what diverges first or failed)
        head = "".join(f"{name:>{_WIDTH}}" for name in COLUMNS)
        print(f"\n{'trainer':<{_NAME}}{'ranks':>6}{head}{'seconds':>9}  result", flush=True)

    def compared(self, name: str, ranks: int, seconds: float, verdict: Verdict) -> None:
        cells = [_exact(verdict.errors[c]) if c == EXACT else f"{verdict.errors[c]:.1e}" for c in COLUMNS]
        self._line(name, ranks, cells, seconds, "same" if verdict.first is None else "DIVERGES")
        if verdict.first is not None:
            self.problems.append((name, verdict.first))

    def served(self, name: str, seconds: float, worst: float, tolerance: float) -> None:
        good = worst <= tolerance
        cells = [f"{worst:.1e}", *["-"] * (len(COLUMNS) - 1)]
        self._line(name, 1, cells, seconds, "same" if good else "DIVERGES")
        if not good:
            self.problems.append((name, f"the log-probs of tokens it drew: off by {worst:.2g}"))

    def failed(self, name: str, ranks: int, seconds: float, reason: str) -> None:
        self._line(name, ranks, ["-"] * len(COLUMNS), seconds, "FAILED")
        self.problems.append((name, f"did not finish: {reason}"))

    def _line(self, name: str, ranks: int, cells: list[str], seconds: float, result: str) -> None:
        self.rows += 1
        shown = "".join(f"{cell:>{_WIDTH}}" for cell in cells)
        print(f"{name:<{_NAME}}{ranks:>6}{shown}{seconds:>9.1f}  {result}", flush=True)


def _exact(differing: float) -> str:
    return "exact" if not differing else f"{int(differing)} differ"
