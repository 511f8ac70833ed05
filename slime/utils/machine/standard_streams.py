"""Opens standard streams that were closed by whoever started the command."""

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_missing() -> None:
    """Open missing streams to nowhere: otherwise the next opened file gets their number, and a library's or a
    child's errors would end up in it.
    """
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number and not _is_open(number):
            os.dup2(nowhere, number)
            os.close(nowhere)
            nowhere = number
        os.set_inheritable(nowhere, True)
        stream = os.fdopen(nowhere, "r" if name == "stdin" else "w", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
