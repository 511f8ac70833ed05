"""`slime quickstart`: train a small model by RL on this machine and show that it learned."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    # Here: the reward plug-ins live in this package too, and loading one must not load the whole command.
    from slime.cli.quickstart.command import main as run_command

    return run_command(argv)
