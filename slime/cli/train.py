"""`slime train`: read the settings, check them and every plug-in, then run the loop of slime/loop.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.arguments import Args, parse_args
from slime.arguments.core.draft import SYNCHRONOUS
from slime.cli.main import user_errors


def load_args(argv: Sequence[str] | None = None, *, training_loop: str = SYNCHRONOUS) -> Args:
    """Settings that are ready to run: parsed, checked, and
    with every plug-in loaded once and bound to its call.
    """
    args = parse_args(argv, training_loop=training_loop)
    # Here, because loading functions loads torch, and a misspelt flag should be told at once.
    from slime.plugins import check_plugins

    check_plugins(args)
    return args


def main(
    argv: Sequence[str] | None = None,
    *,
    train: Callable[[Args], Any] | None = None,
    training_loop: str = SYNCHRONOUS,
) -> int:
    """Run one training. `train` is the loop, and `training_loop`
    its kind; without one it is the synchronous loop.
    """
    with user_errors():
        args = load_args(argv, training_loop=training_loop)
    with user_errors(traceback_file=Path(args.run_dir) / "error.txt"):
        # Here, because --help and a misspelt flag need no screen.
        from slime.cli.screen import RunScreen

        with RunScreen(args):
            (train or run_loop)(args)
    return 0


def run_loop(args: Args) -> None:
    # Here, because it loads torch and everything else, which --help and a misspelt flag do not need.
    from slime.loop import train

    train(args)
