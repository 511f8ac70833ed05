"""Numbers that share one flag: `--timeouts hang=60,host=30` sets two rows of one table."""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


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
    if number - number != 0:  # NaN or infinity; math.isfinite refuses large integers
        raise ValueError("not a finite number")
    for bound, is_met, words in (
        (gt, operator.gt, "greater than"),
        (ge, operator.ge, "at least"),
        (lt, operator.lt, "less than"),
        (le, operator.le, "at most"),
    ):
        if bound is not None and not is_met(number, bound):
            raise ValueError(f"must be {words} {bound:g}")


def read_named_numbers(value: object, rows: Mapping[str, NamedNumber]) -> dict[str, float]:
    """Read `a=1,b=2`, or a mapping from a file. ValueError gives the reason and suggests a known name."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, str):
        pairs = [part.partition("=")[::2] for part in value.split(",") if part.strip()]
    else:
        raise ValueError("expected NAME=NUMBER,...")
    found: dict[str, float] = {}
    for written, number in pairs:
        name = str(written).strip().replace("_", "-").lower()
        name = next((row for row in rows if row.replace("_", "-") == name), name)
        if name not in rows:
            near = get_close_matches(name, rows, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(rows)}"
            raise ValueError(f"there is no {written!r}; {hint}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        try:
            found[name] = _number(number)
            check_range(found[name], ge=rows[name].ge, gt=rows[name].gt, le=rows[name].le)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number - number != 0:  # NaN or infinity; math.isfinite refuses large integers
        raise ValueError("expected a number")
    return number
