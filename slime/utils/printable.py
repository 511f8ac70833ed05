"""Makes text safe to print: no escape sequence reaches the terminal, and no character stops a command."""

from __future__ import annotations

import codecs
import unicodedata
from typing import TextIO

_IN_ASCII = dict(zip("▁▂▃▄▅▆▇█·─│✓…–—’±→×", "_.,-=+*#--|v.--'~>x", strict=True))
_HANDLER = "slime-ascii"


def encode_anything(stream: TextIO | None) -> None:
    """Let a stream with another encoding than UTF-8 print the nearest character that it has, or `?`."""
    if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
        reconfigure(errors=_HANDLER)


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "registered for output only"
    return "".join(_IN_ASCII.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error(_HANDLER, _nearest)


def printable(text: str) -> str:
    """Show control characters as visible signs (ESC is ␛), and escape marks that reverse text."""
    return "".join(map(_shown, text))


def cut_lines(text: str, max_lines: int, width: int) -> str:
    """Shorten text to `max_lines` lines of `width` columns; the last line counts the missing characters."""
    from rich.cells import chop_cells  # imported here: every command loads this module

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
