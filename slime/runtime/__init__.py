"""Runs objects in child processes of this machine or in Ray actors, and decides which devices each gets."""

import importlib.util
from pathlib import Path

from slime.arguments import Args
from slime.catalog.deadlines import timeout_s
from slime.runtime.base import Runtime


def create_runtime(args: Args, run_dir: Path, shm_prefix: str) -> Runtime:
    """Create the runtime that `--runtime` names."""
    if args.runtime == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--runtime ray needs the package ray: pip install 'slime[ray]'.")
        from slime.runtime.on_ray import RayRuntime  # ray is not installed everywhere

        return RayRuntime(run_dir, timeout_s(args, "worker-silence"), timeout_s(args, "host"))
    from slime.runtime.local import LocalRuntime

    return LocalRuntime(run_dir, shm_prefix, timeout_s(args, "worker-silence"))
