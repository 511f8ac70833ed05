"""Numbers of command-line flags, within bounds: what no plan or simulation could mean is named as such."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_GPUS, MOST_TOKENS = 16_384, 1e9


def between(least: float, most: float, kind: type = float) -> Callable[[str], float]:
    """A reader of a flag's number; whole ones have the kind int."""

    def read(word: str) -> float:
        try:
            value: float = kind(word)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{word!r} is no {whole}number from {least:g} to {most:g}")
        return value

    return read
