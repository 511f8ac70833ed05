"""Parses templates of prompts: text with columns in braces, `Q: {question}`."""

import functools
import string


@functools.lru_cache(maxsize=16)
def template_parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return (text, column after it) in order. ValueError: the template is invalid."""
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"not a template ({error}); write {{{{ for a literal brace") from None
    for _, name, spec, conversion in found:
        if name is not None and (not name or spec or conversion):
            raise ValueError("write only the column's name in braces, e.g. {question}")
    if not any(name for _, name, _, _ in found):
        raise ValueError("it names no column; write e.g. {question} where that column goes")
    return tuple((text, name) for text, name, _, _ in found)
