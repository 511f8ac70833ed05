"""Numbers that share one flag: `--timeouts hang=60,host=30` sets two rows of one table."""

import math
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


def check_range(
    number: float,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> None:
    """Raise ValueError with the reason if the number is out of range."""
    if number != number:
        raise ValueError("not a number")
    if gt is not None and not number > gt:
        raise ValueError(f"must be greater than {gt:g}")
    if ge is not None and not number >= ge:
        raise ValueError(f"must be at least {ge:g}")
    if lt is not None and not number < lt:
        raise ValueError(f"must be less than {lt:g}")
    if le is not None and not number <= le:
        raise ValueError(f"must be at most {le:g}")


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
            check_range(found[name], ge=rows[name].ge, gt=rows[name].gt, le=rows[name].le)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _plain(name: str) -> str:
    return name.strip().replace("_", "-").lower()


def _number(value: object) -> float:
    try:
        if (
            not isinstance(value, bool)
            and isinstance(value, (int, float, str))
            and math.isfinite(float(value))
        ):
            return float(value)
    except ValueError:
        pass
    raise ValueError("expected a number")


def _hint(name: str, rows: Mapping[str, NamedNumber]) -> str:
    near = get_close_matches(_plain(name), rows, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(rows)}"
