"""Where a trainer that was lost starts again: on its machines, on others in their place, or on fewer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from slime.arguments import Args
from slime.runtime.base import Runtime
from slime.runtime.placement import Slot
from slime.utils import waits
from slime.utils.errors import RunStopped

logger = logging.getLogger(__name__)

_LOOK_S = 5.0


def find_places(args: Args, runtime: Runtime, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """A place for each rank; with --elastic for as many as the machines that are left can hold.

    Waits for machines that are missing, and says what it needs; RunStopped when --restart-wait-s is over.
    """
    with waits.waiting("machines for the trainer", owner="driver", deadline_s=args.restart_wait_s) as wait:
        told = False
        while True:
            found = [slot for slot in runtime.find_again(slots) if slot is not None]
            if len(found) == len(slots):
                return tuple(found)
            fewer = _whole_replicas(args, len(found)) if args.elastic else 0
            if fewer:
                logger.warning(
                    "%s: --elastic goes on with %d rank(s), each with a larger share of the same batches",
                    *(_missing(slots, found), fewer),
                )
                return tuple(replace(slot, index=rank) for rank, slot in enumerate(found[:fewer]))
            if wait.age_s >= args.restart_wait_s:
                raise RunStopped(
                    f"{_missing(slots, found)}, also after --restart-wait-s {args.restart_wait_s:g}: start "
                    "Ray on another machine and this command again, or go on with fewer ranks by --elastic."
                )
            if not told:
                left = args.restart_wait_s - wait.age_s
                logger.warning(
                    "%s: waiting for another machine to join Ray (%.0f s)", _missing(slots, found), left
                )
            told = True
            time.sleep(min(_LOOK_S, max(0.0, args.restart_wait_s - wait.age_s)))


def _whole_replicas(args: Args, num_places: int) -> int:
    """How many of these ranks hold whole copies of the model; 0: not even one."""
    replica = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    unit = math.lcm(replica, args.expert_model_parallel_size)
    return num_places // unit * unit


def _missing(slots: Sequence[Slot], found: Sequence[Slot]) -> str:
    needs, has = (len({slot.machine for slot in some}) for some in (slots, found))
    return (
        f"the trainer needs {len(slots)} ranks on {needs} machine(s) (--actor-num-nodes, "
        f"--actor-num-gpus-per-node) and has {has} machine(s) for {len(found)}"
    )
