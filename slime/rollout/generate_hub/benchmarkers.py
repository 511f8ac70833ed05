"""Generate functions that put a defined load on engines, for benchmarks."""

import logging
import random
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# Response lengths that are drawn, in tokens: [least, most).
LENGTHS = (32 * 1024, 64 * 1024)


async def generate_with_random_osl(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """Generate a response of a random length, past any end-of-sequence token.

    Lengths are between 32k and 64k tokens. Where --rollout-max-response-len (the limit in `sampling_params`)
    is less, they are drawn from its upper half.
    """
    most = min(LENGTHS[1], int(sampling_params.get("max_new_tokens") or LENGTHS[1]))
    length = random.randrange(min(LENGTHS[0], max(1, most // 2)), most + 1)
    done = await generate(args, sample, sampling_params | {"ignore_eos": True, "max_new_tokens": length})
    logger.info("generate_with_random_osl: %d of %d tokens.", done.response_length, length)
    return done
