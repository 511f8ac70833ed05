"""`slime train-async`: train while the next rollout is generated, with the loop of slime/loop_async.py."""

from collections.abc import Sequence

from slime.arguments import Args
from slime.arguments.core.draft import ASYNCHRONOUS
from slime.cli import train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training with the asynchronous loop."""
    return train.main(argv, train=run_loop, training_loop=ASYNCHRONOUS)


def run_loop(args: Args) -> None:
    # Imported here: it loads torch, which --help and a misspelt flag do not need.
    from slime.loop_async import train

    train(args)
