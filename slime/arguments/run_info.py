"""Facts that are known only during a run, and the `args` of plug-ins: the settings plus these facts."""

import argparse
import copy
from dataclasses import dataclass, field

from slime.arguments.all_flags import Flags
from slime.arguments.args import Args, default_args


@dataclass(frozen=True)
class RunInfo:
    """Facts that are known after start-up. The cluster builds it once; plug-ins see it in their `args`."""

    run_id: str
    run_dir: str
    sglang_router_ip: str | None = None  # None: no engines in this run
    sglang_router_port: int | None = None
    engine_urls: tuple[str, ...] = ()
    num_rollout: int | None = None  # None: not known before the dataset was read
    start_rollout_id: int = 0
    rollout_num_engines: int = 0
    vocab_size: int | None = None
    max_context_len: int | None = None
    num_layers: int | None = None  # layers of the policy; None: no engines, or unknown
    moe_router_topk: int | None = None  # experts per token; None: it has no experts
    overlapped_loop: bool = False  # the loop generates a rollout while it trains on the previous one
    # Address of the router of each model; the policy's is also in the fields above.
    sglang_model_routers: dict[str, tuple[str, int]] = field(default_factory=dict)


class PluginArgs(argparse.Namespace, Flags):
    """The `args` of a plug-in, a copy that it may change: flags, facts of the run, --custom-config-path."""

    sglang_router_ip: str | None
    sglang_router_port: int | None
    sglang_model_routers: dict[str, tuple[str, int]]
    start_rollout_id: int
    run_id: str
    run_dir: str
    engine_urls: list[str]
    rollout_num_engines: int
    vocab_size: int | None
    max_context_len: int | None
    num_layers: int | None
    moe_router_topk: int | None
    overlapped_loop: bool

    def change(self, name: str, value: object) -> None:
        """Set a value that changed during the run; every holder of this object sees it."""
        vars(self)[name] = value


def plugin_args(args: Args, run_info: RunInfo) -> PluginArgs:
    """Return a copy of all arguments, extended by the facts of this run."""
    facts = copy.deepcopy(vars(run_info)) | {"engine_urls": list(run_info.engine_urls)}
    return PluginArgs(**args.to_dict() | facts)


def with_defaults(given: PluginArgs) -> PluginArgs:
    """Fill in place what is missing in a namespace that a plug-in made; our own is returned unchanged."""
    if not isinstance(given, Flags):
        defaults = plugin_args(default_args(rollout_engine="sglang"), RunInfo("", ""))
        for name, value in vars(defaults).items():
            if not hasattr(given, name):
                setattr(given, name, copy.copy(value))
    return given
