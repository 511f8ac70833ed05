"""Numbers that share one flag: `--timeouts hang=60,host=30` sets two rows of one table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class NamedNumber:
    """One row of such a table."""

    default: float
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def check(self, number: float) -> None:
        """Raise ValueError with the reason if the number is out of range."""
        if number != number or number in (float("inf"), float("-inf")):
            raise ValueError("expected a number")
        if self.gt is not None and not number > self.gt:
            raise ValueError(f"must be greater than {self.gt:g}")
        if self.ge is not None and not number >= self.ge:
            raise ValueError(f"must be at least {self.ge:g}")
        if self.le is not None and not number <= self.le:
            raise ValueError(f"must be at most {self.le:g}")


def read_named_numbers(value: object, rows: Mapping[str, NamedNumber]) -> dict[str, float]:
    """Read `a=1,b=2`, or a mapping from a file. ValueError gives the reason, with the name that was meant."""
    pairs: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        pairs = [(str(name), number) for name, number in value.items()]
    elif isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        pairs = [(name.strip(), number.strip()) for name, _, number in parts]
    else:
        raise ValueError("expected NAME=NUMBER,...")
    found: dict[str, float] = {}
    for written, number in pairs:
        name = next((row for row in rows if _plain(row) == _plain(written)), None)
        if name is None:
            raise ValueError(f"there is no {written!r}; {_hint(written, rows)}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        try:
            found[name] = _number(number)
            rows[name].check(found[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _plain(name: str) -> str:
    return name.strip().replace("_", "-").lower()


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("expected a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("expected a number") from None


def _hint(name: str, rows: Mapping[str, NamedNumber]) -> str:
    near = get_close_matches(_plain(name), rows, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(rows)}"
