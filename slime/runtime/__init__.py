"""Runs objects in child processes of this machine or in Ray actors, and decides which devices each gets."""

import importlib.util
from pathlib import Path

from slime.arguments import Args
from slime.runtime.base import Runtime
from slime.utils.misc import load_function


def create_runtime(args: Args, run_dir: Path, shm_prefix: str) -> Runtime:
    """Create the runtime that `--runtime` names."""
    if args.runtime == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--runtime ray needs the package ray: pip install 'slime-rl[ray]'.")
    module = {"local": "local", "ray": "on_ray"}[args.runtime]
    runtime: Runtime = load_function(f"slime.runtime.{module}.open_runtime")(args, run_dir, shm_prefix)
    return runtime
