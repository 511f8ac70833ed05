"""Flags for looking inside a run: half of it alone, and dumps that can be replayed."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class DebugFlags:
    """Debug."""

    debug_rollout_only: bool = flag(False, "generate only; no trainer")
    debug_train_only: bool = flag(False, "train only; no engines (SFT, replayed dumps)")
    save_debug_rollout_data: str | None = flag(
        None, "dump samples: dumps/{rollout_id}.pt", metavar="TEMPLATE"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on dumped samples; no engines", metavar="TEMPLATE"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "replay only this share of a dump", gt=0, le=1
    )
