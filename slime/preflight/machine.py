"""The machine: GPUs, shared memory and disk beside what the run will ask of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from slime.arguments import Args
from slime.preflight.report import Finding
from slime.utils import shm
from slime.utils.accelerator import device_count

_LITTLE_DISK = 1 << 30


def check_machine(args: Args) -> Iterator[Finding]:
    """Of this machine only: what the others of a Ray cluster have is known when it is asked."""
    if args.runtime != "ray":
        yield from _check_gpus(args)
    yield from _check_room(args)


def _check_gpus(args: Args) -> Iterator[Finding]:
    gpus = device_count()
    ranks = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    engines = 0 if args.debug_train_only or args.rollout_external_engine_addrs else args.rollout_num_gpus
    wanted = max(ranks, engines) if args.colocate else ranks + engines
    if gpus and wanted > gpus:
        yield Finding(
            "error",
            "--actor-num-gpus-per-node",
            f"{ranks} for the trainer and {engines} for engines are {wanted} GPUs; this machine shows "
            f"{gpus}: lower them, or share with --colocate.",
        )


def _check_room(args: Args) -> Iterator[Finding]:
    for flag, folder in (("--run-dir", args.run_dir), ("--save", args.save)):
        if folder is None:
            continue
        there = next(
            path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists()
        )
        free = shutil.disk_usage(there).free
        if free < _LITTLE_DISK:
            yield Finding("warning", flag, f"the disk of {there} has {free / 2**20:.0f} MiB left.")
    size = weights_bytes(args.hf_checkpoint)
    free = shutil.disk_usage(shm.FOLDER).free
    if (
        size
        and not args.debug_train_only
        and free < size
        and args.update_weight_transport in (None, "shared_memory")
    ):
        yield Finding(
            "warning",
            "--update-weight-transport",
            f"weights of {size / 2**30:.1f} GiB may travel through {shm.FOLDER}, which has "
            f"{free / 2**30:.1f} GiB left: enlarge it (docker: --shm-size), or use disk.",
        )


def weights_bytes(model: str | None) -> int:
    """Bytes of the weight files in a local model folder; 0: not known."""
    folder = Path(model) if model else None
    return (
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder and folder.is_dir() else 0
    )
