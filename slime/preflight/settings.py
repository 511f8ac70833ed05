"""The settings beside the code that will run them: the loop, and functions of the user's."""

from __future__ import annotations

from collections.abc import Iterator

from slime.arguments import Args
from slime.plugins import check_plugin, configured_plugins
from slime.preflight.findings import Finding, Kind, error_of
from slime.utils.machine.own_command import as_typed
from slime.utils.plugin_imports import missing_imports


def check_loop(args: Args, *, overlapped: bool) -> Iterator[Finding]:
    """Flags that the other loop would obey."""
    if overlapped and args.colocate:
        yield Finding(
            "error",
            "--colocate",
            "it makes engines and trainer take turns, so nothing can overlap: use train.py "
            f"({as_typed('train')})",
            "settings",
        )
    if not overlapped and args.update_weights_interval != 1:
        yield Finding(
            "error",
            "--update-weights-interval",
            f"it needs train_async.py ({as_typed('train-async')}): here engines get weights after every "
            "rollout",
            "settings",
        )


def check_plugin_functions(args: Args) -> Iterator[Finding]:
    """Every configured function is loaded once; its parameters are compared with the call.

    The imports of its module and of the user's modules behind it are looked up, those in functions too.
    """
    found: dict[str, Finding] = {}
    for point, path, where in configured_plugins(args):
        try:
            check_plugin(point, path, where)
        except ValueError as error:
            yield error_of(where, error)
            continue
        for missing in missing_imports(path):
            # A name that the whole tree shares is told once, by the first flag that reaches it.
            kind: Kind = "error" if missing.certain else "warning"
            if str(missing) not in found or (kind == "error" and found[str(missing)].kind == "warning"):
                found[str(missing)] = Finding(kind, where, f"{path}: {missing}")
    yield from found.values()
