"""`python train_async.py`: the asynchronous loop, which is slime/loop_async.py."""

import sys

from slime.cli.train_async import main
from slime.loop_async import train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
