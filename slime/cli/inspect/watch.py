"""`slime watch RUN`: the status of a run, renewed until it ends."""

from slime.cli.inspect.status import watch_main as main

__all__ = ["main"]
