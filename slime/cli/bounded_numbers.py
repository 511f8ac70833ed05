"""Reads numbers of command-line flags and checks their bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_GPUS, MOST_TOKENS = 16_384, 1e9


def between(least: float, most: float, kind: type = float) -> Callable[[str], float]:
    """Return an argparse type for a number from `least` to `most`; `kind` int: a whole number."""

    def read(word: str) -> float:
        try:
            value: float = kind(word)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{word!r} is not a {whole}number from {least:g} to {most:g}")
        return value

    return read
