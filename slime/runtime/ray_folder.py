"""Chooses the folder for the files of a Ray cluster that is started for one run."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

_SOCKET_BYTES = 107  # of its name, at most
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # below a folder of Ray's


def short_folder() -> str | None:
    """Return a folder for Ray if TMPDIR is too long for the names of its sockets; None: Ray's own choice."""
    chosen = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.fsencode(chosen)) + len(_SOCKET) <= _SOCKET_BYTES:
        return None
    logger.warning("Ray's files are in /tmp/ray: %s is too long for the names of its sockets.", chosen)
    return "/tmp/ray"
