"""Python's search for cycles of objects: seldom while modules load, and never among what was there before.

It begins anew after every few hundred new objects and walks through all that the process holds. Behind torch
and transformers these are millions that nobody frees: a seventh of an import, and of the driver's time in a
step of short answers a quarter.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_OF_PYTHON = (700, 10, 10)
_SELDOM = (50_000, 10, 10)
_lock = threading.Lock()
_num_blocks = 0  # of `searching_new_only` that are open: the outermost one counts
_before = _OF_PYTHON  # that one
_stands = False  # `search_new_only` was called: what is left out is left out for good


def search_seldom() -> None:
    """Call this at the start of a process that is slime's own; it lasts for as long as modules are loaded."""
    gc.set_threshold(*_SELDOM)


def search_new_only() -> None:
    """Everything stands: what there is now is not looked at again. New cycles are found as soon as ever."""
    global _stands
    _stands = True
    gc.freeze()
    gc.set_threshold(*_OF_PYTHON)


def search_no_more() -> None:
    """The process ends, and with it all that it holds: the interpreter need not search that for cycles."""
    gc.disable()
    gc.freeze()


@contextlib.contextmanager
def searching_new_only() -> Iterator[None]:
    """Search seldom in a block that makes and drops many objects, of a process that may be another's.

    Blocks may lie within each other, and beside each other in several threads.
    """
    global _num_blocks, _before
    with _lock:
        _num_blocks += 1
        if _num_blocks == 1:
            _before = gc.get_threshold()
            if not _stands:
                gc.freeze()
            gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                gc.set_threshold(*_before)
                if not _stands:
                    gc.unfreeze()
