"""`slime watch RUN`: show the status of a run until it ends."""

from slime.cli.inspect.status import watch_main as main

__all__ = ["main"]
