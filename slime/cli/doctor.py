"""`slime doctor`: check the flags, model, data and reward of a run without starting it."""

from collections.abc import Sequence

from slime.cli import train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks of `slime train --dry-run`."""
    return train.main([*(argv or ()), "--dry-run"])
