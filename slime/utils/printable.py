"""Text that a model wrote, made safe to print: no escape sequence of it reaches the terminal."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t"}


def printable(text: str) -> str:
    """Control characters become visible signs (ESC is shown as ␛), marks
    that turn the direction of text are escaped.
    """
    return "".join(char if _is_plain(char) else _sign(char) for char in text)


def cut_lines(text: str, max_lines: int, width: int) -> str:
    """At most `max_lines` lines of `width` columns; what was left out is said in the last one."""
    lines = [
        line[i : i + width] for line in text.splitlines() or [""] for i in range(0, max(len(line), 1), width)
    ]
    if len(lines) <= max_lines:
        return "\n".join(lines)
    left_out = sum(map(len, lines[max_lines - 1 :]))
    return "\n".join([*lines[: max_lines - 1], f"... ({left_out} more characters)"])


def _is_plain(char: str) -> bool:
    return char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn")


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
