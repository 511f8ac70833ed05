"""Strict JSON for the rows of prompt files: mistakes that Python accepts silently are errors."""

import json
import sys
from collections import Counter
from typing import Any

MAX_DEPTH = 100  # samples are copied and sent between processes, which goes level by level
_NEAR = 20  # characters shown on either side of a mistake


def parse_json(text: str) -> Any:
    """The value; a ValueError says what is wrong and what to write, the caller adds where."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")  # json's own words end in it now and then
        raise ValueError(
            f"not valid JSON ({wrong} at column {error.colno}{_near(text, error.pos)})"
        ) from None
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except _DuplicateKey as error:
        raise ValueError(f"key {error.key!r} stands twice in one object; keep one of them") from None
    except ValueError:  # the only other one: Python refuses to convert so many digits
        digits = sys.get_int_max_str_digits()
        raise ValueError(
            f"a whole number has more than {digits} digits; write it as text, in quotes"
        ) from None
    # Brackets are counted first: few texts have so many; looking at every value takes longer than parsing.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper_than(value, MAX_DEPTH):
        raise ValueError(_too_deep())
    return value


class _DuplicateKey(ValueError):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    counts = Counter(key for key, _ in pairs)
    raise _DuplicateKey(next(key for key, count in counts.items() if count > 1))


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _near(text: str, position: int) -> str:
    piece = text[max(0, position - _NEAR) : position + _NEAR].strip()
    return f", near {piece!r}" if piece else ""


def _too_deep() -> str:
    return f"lists and objects are nested more than {MAX_DEPTH} levels deep; write inner ones as JSON text"
