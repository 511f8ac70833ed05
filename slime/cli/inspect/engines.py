"""`slime engines add|remove RUN ADDRESS...`: let engines join or leave an active run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime.cli.inspect import command, need_run
from slime.cli.inspect.ask import request, wait_for_reply


@command
def main(argv: Sequence[str]) -> int:
    """Request the change for each engine, wait until the run replies, and print the replies."""
    options = _parser().parse_args(argv)
    need_run(options.run)
    name = f"{options.action}_engine"
    numbers = [request(options.run, [name, address]) for address in options.engine]
    print("requested: it takes effect after the current step", flush=True)
    return max(wait_for_reply(options.run, number) for number in numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime engines", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    adds = "generate with engines that serve the model of the run; they get its current weights first"
    removes = "generate without these engines; what they were asked is sent to others"
    for action in (actions.add_parser("add", help=adds), actions.add_parser("remove", help=removes)):
        action.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
        action.add_argument("engine", metavar="ADDRESS", nargs="+", help="host:port, or a URL")
    return parser
