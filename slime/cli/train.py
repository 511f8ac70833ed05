"""`slime train`: read the settings and run the training loop of slime/loop.py."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.arguments import Args, explain_batch
from slime.arguments.core.draft import ASYNCHRONOUS, SYNCHRONOUS
from slime.arguments.parser import Preset, parse_args
from slime.cli.main import USER_MISTAKE, user_errors
from slime.liveness.stacks import watch_exit
from slime.utils.files.folder_lock import refuse_locked
from slime.utils.files.run_file import METRICS_FILE, is_unfinished
from slime.utils.machine.own_command import as_typed


def main(
    argv: Sequence[str] | None = None,
    *,
    train: Callable[[Args], Any] | None = None,
    training_loop: str = SYNCHRONOUS,
    preset: Preset | None = None,
    spell: Callable[[str], str] = str,
    command: str | None = None,
) -> int:
    """Run one training. `train` is the loop, `training_loop` its kind; default: the synchronous loop.

    Commands such as `slime sft` pass `preset` values of flags, and `spell`, which rewrites messages with the
    options that the user typed.
    """
    try:
        command = command or ("train-async" if training_loop == ASYNCHRONOUS else "train")
        return _main(argv, train or run_loop, training_loop, preset, spell, command)
    finally:
        if argv is None:
            watch_exit()


def _main(
    argv: Sequence[str] | None,
    train: Callable[[Args], Any],
    training_loop: str,
    preset: Preset | None,
    spell: Callable[[str], str],
    command: str,
) -> int:
    with user_errors(spell=spell):
        args = parse_args(argv, training_loop=training_loop, preset=preset)
        # Imported here, so that a misspelt flag is reported quickly.
        from slime.cluster.run_opening import claimed, nothing_left, refuse_taken

        if reason := nothing_left(args):
            print(spell(reason))
            return 0
        if args.dry_run:
            return dry_run(args, command, overlapped=training_loop == ASYNCHRONOUS, spell=spell)
    with claimed(args) as args:
        with user_errors(spell=spell):
            # Opened before the slow checks and before the live view, which shows the folder's log.
            refuse_locked(Path(args.run_dir), "--run-dir")
            if args.save is not None:
                refuse_locked(Path(args.save), "--save")
            _clear_unfinished_evaluation(args)
            refuse_taken(args)
        with user_errors(traceback_file=Path(args.run_dir) / "error.txt", spell=spell), shown(args, command):
            train(args)
    return 0


def _clear_unfinished_evaluation(args: Args) -> None:
    """Remove the metrics and samples of this same evaluation if it did not finish: it starts again."""
    # Imported here: --help and a misspelt flag do not need it.
    from slime.record import RECORD_FILE, record_file

    folder = Path(args.run_dir)
    only_evaluates = args.debug_rollout_only and args.num_rollout == 0 and args.save is None
    if only_evaluates and is_unfinished(folder, args.to_dict(hide_secrets=True), None):
        for file in (folder / METRICS_FILE, folder / RECORD_FILE, record_file(folder)):
            for path in file.parent.glob(f"{file.name}*"):  # with the write-ahead log of a record
                path.unlink()


@contextlib.contextmanager
def shown(args: Args, command: str = "train", *, screen: bool = True) -> Iterator[None]:
    """Show a run while it is active: on this terminal and, with --dashboard, in a browser."""
    # Imported here: --help and a misspelt flag do not need it.
    from slime.cli.inspect.page_process import page_beside
    from slime.cli.screen import RunScreen

    with (
        RunScreen(args, command) if screen else contextlib.nullcontext(),
        page_beside(args.run_dir) if args.dashboard else contextlib.nullcontext(),
    ):
        yield


def dry_run(args: Args, command: str, *, overlapped: bool = False, spell: Callable[[str], str] = str) -> int:
    """Print the findings of the preflight check. Return 0 if the run can start, else 2."""
    # Imported here: it loads torch, which a misspelt flag does not need.
    from slime.cluster.start import check

    print(explain_batch(args))
    report = check(args, overlapped=overlapped)
    print(spell("\n".join(report.lines())))
    errors = len(report.of("error"))
    if errors:
        print(f"{errors} problem{'s' if errors > 1 else ''} found; nothing was started.", file=sys.stderr)
        return USER_MISTAKE
    print(f"ready: `{as_typed(command)}` with these flags can start")
    return 0


def run_loop(args: Args) -> None:
    # Imported here: it loads torch, which --help and a misspelt flag do not need.
    from slime.loop import train

    train(args)
