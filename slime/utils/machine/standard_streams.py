"""Standard streams that whoever started a command had closed: they lead nowhere instead of being missing."""

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_missing() -> None:
    """Python has None where a stream was closed (`2>&-`), and its number is the next file's that is opened:
    what a library or a child writes to its errors would end up in there.
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
