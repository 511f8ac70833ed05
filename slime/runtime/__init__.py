"""Where objects run: child processes of this machine or Ray actors, and which devices each gets."""

import importlib.util
from pathlib import Path

from slime.arguments import Args
from slime.runtime.base import Runtime


def create_runtime(args: Args, run_dir: Path, shm_prefix: str) -> Runtime:
    """The runtime that `--runtime` names."""
    if args.runtime == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--runtime ray needs the package ray: pip install 'slime[ray]'.")
        from slime.runtime.on_ray import RayRuntime  # ray is not installed everywhere

        return RayRuntime(run_dir, args.worker_silence_timeout_s, args.host_timeout_s)
    from slime.runtime.local import LocalRuntime

    return LocalRuntime(run_dir, shm_prefix, args.worker_silence_timeout_s)
