"""Keeps functions of the user's from ending the processes of the run that they are called in.

A reward that cleans up after itself may end all children of its process. In a local run these are the engines
and the trainer ranks, and their end would look like a crash of each of them.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from slime.utils.machine.processes import Child
from slime.utils.plugin_errors import PluginError, is_users_code

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_EVENTS = ("os.kill", "os.killpg")
_children: dict[int, Child] = {}
_hooked = False


def protect(child: Child) -> Child:
    """From now on no function of the user's that slime calls in this process can send it a signal."""
    global _hooked
    _children[child.pid] = child
    if not _hooked:
        _hooked = True
        sys.addaudithook(_look)
    return child


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    pid, number = arguments
    child = _children.get(pid)
    if child is None or number == 0 or child.returncode is not None:
        return
    place = _place_in_users_function()
    if place is not None:
        raise PluginError(
            f"{place} sends signal {int(number)} to process {pid}, an engine or a trainer rank of this run; "
            "the signal was not sent. Children of this process are the run's own: end only processes that "
            "the function started itself, by the number that it got when it started them."
        )


def _place_in_users_function() -> str | None:
    """The line of a function of the user's that slime called; None: slime itself acts, or other code."""
    place: str | None = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_PACKAGE)
        if place is None and ours:
            return None
        if place is not None and ours:
            return place
        if place is None and is_users_code(name):
            place = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
