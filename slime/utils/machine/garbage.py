"""Makes Python's garbage collector run rarely while modules load, and skip what was loaded before.

By default it runs after every few hundred new objects and walks through millions of objects of torch and
transformers that are never freed: that took a seventh of an import, and a quarter of the driver's time in a
step of short responses.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_DEFAULT = (700, 10, 10)  # Python's own thresholds
_RARE = (50_000, 10, 10)


def search_seldom() -> None:
    """Collect rarely while modules load; call this at the start of a process of slime."""
    gc.set_threshold(*_RARE)


def search_new_only() -> None:
    """Exclude all current objects from collection for good: after the imports, and at the exit."""
    gc.freeze()
    gc.set_threshold(*_DEFAULT)


@contextlib.contextmanager
def searching_new_only() -> Iterator[None]:
    """Collect rarely in a block that creates and drops many objects: the loop of the driver."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
