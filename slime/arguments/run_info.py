"""Facts that exist only while a run is going, and what plug-ins see: the arguments plus those facts."""

import argparse
import copy
from dataclasses import dataclass, field

from slime.arguments.all_flags import Flags
from slime.arguments.args import Args, default_args


@dataclass(frozen=True)
class RunInfo:
    """What start-up found out. The cluster builds it once; nobody changes it.

    Example: RunInfo("add-1234:7f3a", "runs/add-1234", "127.0.0.1", 40123,
    ("http://127.0.0.1:40125",), 60, 0, 1, 512, 256).
    """

    run_id: str
    run_dir: str
    router_ip: str | None = None  # None: no engines in this run
    router_port: int | None = None
    engine_urls: tuple[str, ...] = ()
    num_rollout: int | None = None  # None: not known before the dataset was read
    start_rollout_id: int = 0
    num_engines: int = 0
    vocab_size: int | None = None
    max_context_len: int | None = None
    num_layers: int | None = None  # of the policy; None: no engines, or its config does not say
    moe_router_topk: int | None = None  # experts per token; None: it has no experts
    overlapped: bool = False  # the loop makes a rollout while the one before it is trained
    # Address of the router of each model; that of the policy also stands above.
    model_routers: dict[str, tuple[str, int]] = field(default_factory=dict)


class PluginArgs(argparse.Namespace, Flags):
    """What a plug-in gets as `args`, its own to change: flags, facts of the run, --custom-config-path."""

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

    def change(self, name: str, value: float) -> None:
        """Set a value that was changed during the run; everybody who holds this object sees it."""
        vars(self)[name] = value


def plugin_args(args: Args, run_info: RunInfo) -> PluginArgs:
    """A copy of all arguments, with the facts of this run laid over them."""
    return PluginArgs(
        **args.to_dict()
        | {
            "sglang_router_ip": run_info.router_ip,
            "sglang_router_port": run_info.router_port,
            "sglang_model_routers": dict(run_info.model_routers),
            "num_rollout": run_info.num_rollout,
            "start_rollout_id": run_info.start_rollout_id,
            "run_id": run_info.run_id,
            "run_dir": run_info.run_dir,
            "engine_urls": list(run_info.engine_urls),
            "rollout_num_engines": run_info.num_engines,
            "vocab_size": run_info.vocab_size,
            "max_context_len": run_info.max_context_len,
            "num_layers": run_info.num_layers,
            "moe_router_topk": run_info.moe_router_topk,
            "overlapped_loop": run_info.overlapped,
        }
    )


def with_defaults(given: PluginArgs) -> PluginArgs:
    """A namespace that a plug-in made for itself gets, in place, what it leaves out; ours stays as it is."""
    if not isinstance(given, Flags):
        defaults = plugin_args(default_args(rollout_engine="sglang"), RunInfo("", ""))
        for name, value in vars(defaults).items():
            if not hasattr(given, name):
                setattr(given, name, copy.copy(value))
    return given
