"""Processes that may end while a test looks at them."""

import psutil


def cmdline(process: psutil.Process) -> list[str]:
    """[] of one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
