"""Text that a model wrote, made safe to print: no escape sequence of it reaches the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

_KEPT = {"\n", "\t"}


def printable(text: str) -> str:
    """Control characters become visible signs (ESC is shown as ␛), marks
    that turn the direction of text are escaped.
    """
    return "".join(char if _is_plain(char) else _sign(char) for char in text)


def cut_lines(text: str, max_lines: int, width: int) -> str:
    """Cuts to `max_lines` lines of `width` columns; what was left out is said in the last one."""
    lines = [piece for line in text.expandtabs(4).splitlines() or [""] for piece in _pieces(line, width)]
    if len(lines) <= max_lines:
        return "\n".join(lines)
    left_out = sum(map(len, lines[max_lines - 1 :]))
    return "\n".join([*lines[: max_lines - 1], f"... ({left_out} more characters)"])


def _pieces(line: str, width: int) -> Iterator[str]:
    """The line in pieces of `width` columns; a wide character, such as a Chinese one, takes two."""
    start = columns = 0
    for i, char in enumerate(line):
        takes = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if columns + takes > width and i > start:
            yield line[start:i]
            start, columns = i, 0
        columns += takes
    yield line[start:]


def _is_plain(char: str) -> bool:
    return char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn")


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
