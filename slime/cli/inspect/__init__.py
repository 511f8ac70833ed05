"""Commands about an existing run: they read its folder, while it runs or after it ended."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.record.place import describe_copy
from slime.utils.files.run_file import RunRecord, no_run, read_run

MISTAKE = 2  # exit code


def command(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorator: ValueError and PermissionError end the command with one `error:` line and exit code 2."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
        except PermissionError as error:
            print(f"error: {error.filename}: {error.strerror}; ask for access to it.", file=sys.stderr)
        return MISTAKE

    return guarded


def run_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `slime NAME RUN`."""
    parser = argparse.ArgumentParser(f"slime {name}", description=description, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    return parser


def report_copy(folder: Path) -> None:
    """Print on stderr where the record of a run is and how old its copy is, if this host has only that."""
    if (about := describe_copy(folder)) is not None:
        print(about, file=sys.stderr)


def need_run(folder: Path) -> RunRecord:
    """Return run.json of a folder; ValueError where there is none."""
    run = read_run(folder)
    if run is None:
        raise ValueError(no_run(folder))
    return run
