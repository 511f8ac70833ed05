"""`slime track RUN NAME`: send an ended run to a tracker, or the rest that the tracker missed."""

import contextlib
import sys
from collections.abc import Sequence

from slime.catalog.trackers import TRACKERS, missing_package
from slime.cli.inspect import command, need_run, run_parser
from slime.observability.trackers.follower import Follower, follow, only_one, progress_file, tracked_run
from slime.utils.files.folder_lock import is_locked
from slime.utils.misc import is_installed, load_function


@command
def main(argv: Sequence[str]) -> int:
    parser = run_parser("track", __doc__)
    parser.add_argument("name", choices=sorted(TRACKERS), help="the tracker")
    parser.add_argument("--again", action="store_true", help="send everything again from the beginning")
    options = parser.parse_args(argv)
    name, folder = options.name, options.run.absolute()
    need_run(folder)
    if is_locked(folder, "--run-dir"):
        raise ValueError(f"{folder}: the run is still active; --use-{name} sends its metrics meanwhile.")
    if not is_installed(TRACKERS[name].package):
        raise ValueError(missing_package(name))
    log = folder / "logs" / f"tracker-{name}.log"
    log.parent.mkdir(exist_ok=True)
    with only_one(folder, name), log.open("a") as details:
        if options.again:
            progress_file(folder, name).unlink(missing_ok=True)
        follower = Follower(name, tracked_run(folder), load_function(TRACKERS[name].service))
        with contextlib.redirect_stderr(details):
            sent_all = follow(follower, lambda seconds: True)
    if not sent_all:
        print(f"error: {TRACKERS[name].title}: {follower.progress.error} (details: {log})", file=sys.stderr)
        return 1
    sent, refused = follower.progress.offset, follower.progress.refused
    left_out = f"; {refused} reports were refused" if refused else ""
    print(f"{TRACKERS[name].title} has the run: {sent:,} bytes of metrics{left_out}")
    return 0
