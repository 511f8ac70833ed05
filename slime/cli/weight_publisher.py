"""`slime weight-publisher`: serve a trainer's published weights to weight agents on other machines."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime.cli.bounded_numbers import between
from slime.cli.main import user_errors
from slime.observability.logging_utils import configure_logger
from slime.weight_sync.delta.weight_agent import publisher_app, serve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("slime weight-publisher", description=__doc__.partition(":")[2].strip())
    parser.add_argument("folder", metavar="DIR", help="the trainer's --update-weight-disk-dir")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    port = "port to listen on; 0: any free port, which is printed"
    parser.add_argument("--port", type=between(0, 65535, int), required=True, help=port)
    options = parser.parse_args(argv)
    with user_errors():
        configure_logger()
        folder = Path(options.folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the trainer's --update-weight-disk-dir.")
        serve(publisher_app(folder), options.host, options.port)
    return 0
