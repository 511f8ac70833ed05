"""Runs objects in child processes of this machine or in Ray actors, and decides which devices each gets."""

import importlib.util
from pathlib import Path

from slime.arguments import Args
from slime.catalog.runtimes import RUNTIMES
from slime.runtime.base import Runtime
from slime.utils.misc import load_function


def create_runtime(args: Args, run_dir: Path, shm_prefix: str) -> Runtime:
    """Create the runtime that `--runtime` names."""
    row = RUNTIMES[args.runtime]
    if row.package is not None and importlib.util.find_spec(row.package) is None:
        raise ValueError(
            f"--runtime {args.runtime} needs the package {row.package}: pip install 'slime[{row.package}]'."
        )
    runtime: Runtime = load_function(row.create)(args, run_dir, shm_prefix)
    return runtime
