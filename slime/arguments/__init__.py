"""The settings of a run: every flag declared once, read from command line and files, checked, then frozen."""

from slime.arguments.all_flags import Flags
from slime.arguments.args import Args, default_args
from slime.arguments.parser import parse_args
from slime.arguments.run_info import PluginArgs, RunInfo, plugin_args, with_defaults
from slime.arguments.show import explain_batch

__all__ = [
    "Args",
    "Flags",
    "PluginArgs",
    "RunInfo",
    "default_args",
    "explain_batch",
    "parse_args",
    "plugin_args",
    "with_defaults",
]
