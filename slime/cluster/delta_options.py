"""What the flags of a run say about sending deltas of the weights."""

from __future__ import annotations

from pathlib import Path

from slime.arguments import Args
from slime.cluster.run import Run
from slime.engines.external import read_address
from slime.weight_sync.base import DeltaOptions


def delta_options(args: Args, run: Run) -> DeltaOptions | None:
    """None: whole weights are sent."""
    if args.update_weight_mode != "delta":
        return None
    engines = [read_address(address) for address in args.rollout_external_engine_addrs or ()]
    agents = [read_address(address, "--weight-agent-addrs") for address in args.weight_agent_addrs or ()]
    return DeltaOptions(
        local=Path(args.update_weight_local_checkpoint_dir or run.run_dir / "local-weights"),
        remove_local=args.update_weight_local_checkpoint_dir is None
        and not args.update_weight_disk_keep_files,
        encoding=args.update_weight_delta_encoding,
        checksum=args.update_weight_delta_checksum,
        agents=dict(zip(engines, agents, strict=False)),  # no agents at all: engines read this machine's disk
    )
