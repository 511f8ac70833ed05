"""A rollout function that does nothing: engines stay up, for requests by hand, until Ctrl-C."""

import logging
import math
import time
from typing import Any, NoReturn

from slime.arguments import PluginArgs
from slime.liveness import waits

logger = logging.getLogger(__name__)
_SLEEP_S = 60.0


def sleep(args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """A rollout that only sleeps, for --rollout-function-path with --debug-rollout-only."""
    router = f"{args.sglang_router_ip}:{args.sglang_router_port}"
    logger.info("The engines are ready at %s; Ctrl-C ends the run.", router)
    with waits.waiting("Ctrl-C", owner="rollout", deadline_s=math.inf):  # no hang: it is meant to last
        while True:
            time.sleep(_SLEEP_S)
