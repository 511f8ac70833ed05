"""`slime weight-agent`: keep a copy of the trainer's weights next to an engine, and load it on request."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from slime.arguments.groups.engine import CHECKSUMS, need_delta_packages
from slime.cli.bounded_numbers import between
from slime.cli.main import user_errors
from slime.engines.external import read_address
from slime.observability.logging_utils import configure_logger
from slime.utils.http_utils import TOKEN_VARIABLE, authorize
from slime.weight_sync.delta.publication import open_source
from slime.weight_sync.delta.weight_agent import WeightAgent, serve


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors():
        configure_logger()
        need_delta_packages(CHECKSUMS[0])
        local = Path(options.local_checkpoint_dir)
        local.mkdir(parents=True, exist_ok=True)
        engine = read_address(options.engine, "--engine")
        for url in (engine, options.source):
            authorize(url, os.environ.get(TOKEN_VARIABLE))
        agent = WeightAgent(open_source(options.source), local, engine, options.wait_s)
        serve(agent.app(), options.host, options.port)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime weight-agent", description=__doc__.partition(":")[2].strip())
    add = parser.add_argument
    add("--engine", required=True, metavar="HOST:PORT", help="address of the engine")
    add(
        "--source",
        required=True,
        metavar="DIR|URL",
        help="the trainer's --update-weight-disk-dir, or http://host:port of `slime weight-publisher`",
    )
    add("--local-checkpoint-dir", required=True, metavar="DIR", help="folder of the copy")
    add("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    add(
        "--port",
        type=between(0, 65535, int),
        required=True,
        help="port to listen on; 0: any free port, which is printed",
    )
    add("--wait-s", type=float, default=600.0, help="time limit for a version [600]")
    return parser
