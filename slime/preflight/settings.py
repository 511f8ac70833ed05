"""Checks that the user's functions can be imported and called as slime calls them."""

from __future__ import annotations

from collections.abc import Iterator

from slime.arguments import Args
from slime.plugins import check_plugin, configured_plugins
from slime.preflight.findings import Finding, Kind, error_of
from slime.utils.plugin_imports import missing_imports


def check_plugin_functions(args: Args) -> Iterator[Finding]:
    """Load every configured function, compare its parameters with the call, and look up imports."""
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
