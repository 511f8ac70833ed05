"""`python -m slime ...` is the same as `slime ...`."""

import sys

from slime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
