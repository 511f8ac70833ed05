"""Python's search for cycles of objects: seldom while modules load, and never among what was there before.

It begins anew after every few hundred new objects and walks through all that the process holds. Behind torch
and transformers these are millions that nobody frees: a seventh of an import, and of the driver's time in a
step of short answers a quarter.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_OF_PYTHON = (700, 10, 10)
_SELDOM = (50_000, 10, 10)


def search_seldom() -> None:
    """Call this at the start of a process that is slime's own; it lasts for as long as modules are loaded."""
    gc.set_threshold(*_SELDOM)


def search_new_only() -> None:
    """Everything stands: what there is now is not looked at again. New cycles are found as soon as ever."""
    gc.freeze()
    gc.set_threshold(*_OF_PYTHON)


@contextlib.contextmanager
def searching_new_only() -> Iterator[None]:
    """Search seldom in a block that makes and drops many objects, of a process that may be another's."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
