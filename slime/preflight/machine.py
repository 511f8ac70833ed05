"""Checks that the machine's GPUs, shared memory and disk suffice for the run."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from slime.arguments import Args
from slime.engines.external import read_address
from slime.preflight.findings import COST, Finding
from slime.preflight.prompts import usual_length
from slime.preflight.run_plan import Device, RunPlan, plan_run
from slime.utils.machine import shm
from slime.utils.machine.accelerator import device_count
from slime.utils.machine.cores import num_cores
from slime.utils.machine.ports import is_port_available

_SETS = 2  # copies of the weights in shared memory: the served version and the next
_LITTLE_DISK = 1 << 30
_JOB_FOLDER = "working_dir_files"  # in Ray's folder, copies of `ray job submit --working-dir`
_ROUTER_PATIENCE_S = 20.0
_PROCESSES_PER_CORE, _MANY_PROCESSES = 8, 32  # more processes than this would not make progress


def check_machine(args: Args) -> Iterator[Finding]:
    """Check the GPUs or cores of this machine; other hosts of a Ray cluster are known only once Ray runs."""
    if args.runtime != "ray":
        yield from _check_devices(args)
        yield from _check_port(args)
    yield from _check_router(args)
    yield from _check_room(args)


def _check_devices(args: Args) -> Iterator[Finding]:
    gpus, cores = min(device_count(), args.num_gpus_per_node or 0), num_cores()
    ranks = 0 if args.debug_rollout_only else args.actor_num_nodes * (args.actor_num_gpus_per_node or 0)
    none_of_ours = args.debug_train_only or args.rollout_external_engine_addrs
    engines = 0 if none_of_ours else args.engine_topology.num_gpus
    wanted = max(ranks, engines) if args.colocate else ranks + engines
    text = f"{ranks} for the trainer and {engines} for engines are {wanted}"
    if gpus and wanted > gpus:
        text += (
            f" GPUs; this machine shows {gpus}: lower them or --rollout-num-gpus, or share with --colocate."
        )
        yield Finding("error", "--actor-num-gpus-per-node", text)
    elif not gpus and wanted > max(_MANY_PROCESSES, _PROCESSES_PER_CORE * cores):
        text += f" processes on {cores} core(s) of a machine without GPUs: lower them and --rollout-num-gpus."
        yield Finding("error", "--actor-num-gpus-per-node", text)


def _check_router(args: Args) -> Iterator[Finding]:
    """Check that an external router can be reached, and that it has no engines of other runs."""
    host, port = args.sglang_router_ip, args.sglang_router_port
    if host is None or args.debug_train_only:
        return
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/workers", timeout=_ROUTER_PATIENCE_S) as answer:
            workers = json.load(answer)["workers"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        text = f"no router replies at {host}:{port} (GET /workers: {error}): start it, or leave the flag out"
        yield Finding("error", "--sglang-router-ip", f"{text} and slime starts one.")
        return
    ours = {read_address(address) for address in args.rollout_external_engine_addrs or ()}
    others = sorted({w["url"] for w in workers if w.get("is_healthy", True)} - ours)
    if others:
        has = f"the router at {host}:{port} has engines already ({', '.join(others[:3])})"
        text = f"{has}, whose answers would mix with those of this run's weights: take them out."
        yield Finding("error", "--sglang-router-ip", text)


def _check_port(args: Args) -> Iterator[Finding]:
    port = args.sglang_router_port
    if port is None or args.debug_train_only or args.sglang_router_ip is not None:
        return
    if not is_port_available(port):
        text = f"port {port} is not free: choose another, or leave the flag out."
        yield Finding("error", "--sglang-router-port", text)


def predict(args: Args) -> tuple[RunPlan | None, list[Finding]]:
    """Predict memory and time of a step; None where the model's configuration is missing or unknown."""
    if args.hf_checkpoint is None:
        return None, []
    try:
        plan = plan_run(args, Device.here(), usual_length(args))
    except ValueError:
        return None, []
    return plan, [] if "machine" in args.skip_preflight else [*check_memory(args, plan)]


def check_memory(args: Args, plan: RunPlan) -> Iterator[Finding]:
    """Report what a step needs; an estimate keeps no run from starting."""
    device = Device.here()
    for line in plan.lines(device.room if device.is_gpu else None):
        yield Finding("warning" if line.startswith("does not fit") else "note", COST, line)
    whole_s = plan.step_s * (args.num_rollout or 0)
    if whole_s >= 60:  # in shorter runs most of the time goes into what is not predicted
        whole = f"{whole_s / 3600:.1f} hours" if whole_s >= 7200 else f"{whole_s / 60:.0f} minutes"
        yield Finding("note", COST, f"{args.num_rollout} steps: about {whole}, and what evaluations take")
    if not device.is_gpu and args.runtime != "ray":
        ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
        engines = args.engine_topology.num_gpus
        total = sum(plan.trainer.values()) * ranks + sum(plan.engine.values()) * engines
        if total > device.room:
            need, has = f"{total / 2**30:.1f} GiB", f"{device.room / 2**30:.1f}"
            text = f"all processes together need about {need}, this machine has {has}."
            yield Finding("warning", COST, text)
    yield from check_copies(plan)


def check_copies(plan: RunPlan) -> Iterator[Finding]:
    """Check that both copies of --peer-copies fit into memory."""
    free = shutil.disk_usage(shm.FOLDER).free
    if plan.copies > free:
        need, left = (
            f"{plan.copies / 2**30:.2f} GiB of {shm.FOLDER}",
            f"which has {free / 2**30:.2f} GiB left",
        )
        text = (
            f"two copies of the trainer's state need about {need}, {left}: enlarge it (docker: --shm-size)."
        )
        yield Finding("warning", "--peer-copies", text)


def _check_room(args: Args) -> Iterator[Finding]:
    for flag, folder in (("--run-dir", args.run_dir or "runs"), ("--save", args.save)):
        if folder is None or (flag == "--save" and Path(args.run_dir) in Path(folder).parents):
            continue  # what is in the run's folder is checked with it
        path = Path(folder).absolute()
        if _JOB_FOLDER in path.parts:
            text = f"{path} is in a folder of Ray that is removed with this job: give an absolute path."
            yield Finding("error", flag, text)
            continue
        there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
        free = shutil.disk_usage(there).free
        if free < _LITTLE_DISK:
            yield Finding("warning", flag, f"the disk of {there} has {free / 2**20:.0f} MiB left.")
    needed = _SETS * weights_bytes(args.hf_checkpoint)
    free = shutil.disk_usage(shm.FOLDER).free
    shared = args.update_weight_transport in ("auto", "shared_memory") and not args.debug_train_only
    if shared and free < needed:
        text = (
            f"weights may travel through {shm.FOLDER}, which has {free / 2**30:.2g} GiB left and needs "
            f"{needed / 2**30:.2g} for two versions: enlarge it (docker: --shm-size), or use disk."
        )
        yield Finding("warning", "--update-weight-transport", text)


def weights_bytes(model: str | None) -> int:
    """Return the bytes of the weight files in a local model folder; 0: not known."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) if model else 0
