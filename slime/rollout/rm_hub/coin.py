"""The `random` reward: a coin, to see what training does without any signal."""

import random

from slime.arguments import PluginArgs
from slime.utils.types import Sample


async def toss(args: PluginArgs, sample: Sample, *, response: str) -> int:
    """0 or 1 by the seed, the sample and its response, so that a resumed run tosses the same way."""
    # A response may end in half a character, which is no error here.
    seed = f"{args.rollout_seed}/{sample.index}/{response}".encode(errors="surrogatepass")
    return random.Random(seed).randint(0, 1)
