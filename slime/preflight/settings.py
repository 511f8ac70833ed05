"""The settings beside the code that will run them: the loop, and functions of the user's."""

from __future__ import annotations

from collections.abc import Iterator

from slime.arguments import Args
from slime.plugins import check_plugin, configured_plugins
from slime.preflight.findings import Finding, error_of


def check_loop(args: Args, *, overlapped: bool) -> Iterator[Finding]:
    """Flags that the other loop would obey."""
    if overlapped and args.colocate:
        yield Finding(
            "error",
            "--colocate",
            "it makes engines and trainer take turns, so nothing can overlap: use train.py (slime train)",
            "settings",
        )
    if not overlapped and args.update_weights_interval != 1:
        yield Finding(
            "error",
            "--update-weights-interval",
            "it needs train_async.py (slime train-async): here engines get weights after every rollout",
            "settings",
        )


def check_plugin_functions(args: Args) -> Iterator[Finding]:
    """Every configured function is loaded once, and its parameters are compared with the call."""
    for point, path, where in configured_plugins(args):
        try:
            check_plugin(point, path, where)
        except ValueError as error:
            yield error_of(where, error)
