"""Makes text that a model wrote safe to print: no escape sequence reaches the terminal."""

from __future__ import annotations

import unicodedata

from rich.cells import chop_cells


def printable(text: str) -> str:
    """Show control characters as visible signs (ESC is ␛), and escape marks that reverse text."""
    return "".join(map(_shown, text))


def cut_lines(text: str, max_lines: int, width: int) -> str:
    """Shorten text to `max_lines` lines of `width` columns; the last line counts the missing characters."""
    lines = [piece for line in text.expandtabs(4).splitlines() for piece in chop_cells(line, width) or [""]]
    if len(lines) <= max_lines:
        return "\n".join(lines)
    left_out = sum(map(len, lines[max_lines - 1 :]))
    return "\n".join([*lines[: max_lines - 1], f"... ({left_out} more characters)"])


def _shown(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return char
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
