"""`slime track RUN NAME`: send a run to a tracker after its end, or what the tracker missed of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.catalog.trackers import TRACKERS, missing_package
from slime.observability.trackers.follower import Follower, follow, only_one, progress_file, tracked_run
from slime.utils.files.folder_lock import is_locked
from slime.utils.files.run_file import no_run, read_run
from slime.utils.misc import is_installed, load_function


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("slime track", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("name", choices=sorted(TRACKERS), help="the tracker")
    parser.add_argument("--again", action="store_true", help="from the beginning, whatever was sent before")
    options = parser.parse_args(argv)
    name, folder = options.name, options.run.absolute()
    if trouble := _refusal(name, folder):
        print(f"error: {trouble}", file=sys.stderr)
        return 2
    with only_one(folder, name):
        if options.again:
            progress_file(folder, name).unlink(missing_ok=True)
        follower = Follower(name, tracked_run(folder), load_function(TRACKERS[name].service))
        if not follow(follower, lambda seconds: True):
            print(f"error: {TRACKERS[name].title}: {follower.progress.error}", file=sys.stderr)
            return 1
    sent, refused = follower.progress.offset, follower.progress.refused
    print(
        f"{TRACKERS[name].title} has the run: {sent:,} bytes of metrics"
        + (f"; {refused} reports were refused" if refused else "")
    )
    return 0


def _refusal(name: str, folder: Path) -> str | None:
    if read_run(folder) is None:
        return no_run(folder)
    if is_locked(folder, "--run-dir"):
        return f"{folder}: the run goes on; what --use-{name} could not send yet is sent when it answers."
    return None if is_installed(TRACKERS[name].package) else missing_package(name)
