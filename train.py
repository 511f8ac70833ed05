"""`python train.py`: the synchronous loop, which is slime/loop.py."""

import sys

from slime.cli.train import main
from slime.loop import train

if __name__ == "__main__":
    sys.exit(main(train=train))
