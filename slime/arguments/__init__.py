"""The settings of a run: every flag declared once, read from command line and files, checked, then frozen."""

import importlib
from typing import Any

from slime.arguments.all_flags import Flags
from slime.arguments.args import Args, default_args
from slime.arguments.groups.training import explain_batch
from slime.arguments.run_info import PluginArgs, RunInfo, plugin_args, with_defaults

__all__ = ["Args", "Flags", "PluginArgs", "RunInfo", "default_args", "explain_batch", "plugin_args"]
__all__ += ["with_defaults"]


def __getattr__(name: str) -> Any:
    """Load the parser only when a script asks for `parse_args`; readers of settings do not need it."""
    if name == "parse_args":
        return importlib.import_module("slime.arguments.parser").parse_args
    raise AttributeError(f"module 'slime.arguments' has no attribute {name!r}")
