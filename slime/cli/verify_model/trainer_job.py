"""Runs one trainer under one layout in child processes, with a time limit."""

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments import default_args
from slime.backends.shared.microbatch import build_micro_batch
from slime.backends.shared.trainer_base import TrainBackend
from slime.catalog.backends import BACKENDS
from slime.cli.verify_model import reference
from slime.cli.verify_model.cases import (
    DENOMINATORS,
    LEARNING_RATE,
    NUM_DOCUMENTS,
    CaseOutcome,
    buffers_of,
    documents,
    linear_loss,
)
from slime.cli.verify_model.layouts import CheckTarget
from slime.utils.machine.children import watch_parent
from slime.utils.machine.process_groups import stay_on_loopback


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """One trainer to run. `before_build` is called first in every process: tests inject a fault there."""

    model: str
    target: CheckTarget
    folder: str
    vocabulary: int
    before_build: Callable[[], None] | None = None


class JobFailed(Exception):
    """A trainer did not finish; the message gives the reason."""


def run(job: TrainerJob, deadline_s: float) -> CaseOutcome:
    """Start the ranks and wait for them; kill all when one fails or the time is up."""
    context = multiprocessing.get_context("spawn")
    numbers = range(job.target.ranks)
    ranks = [context.Process(target=_rank_main, args=(rank, job), daemon=True) for rank in numbers]
    Path(job.folder).mkdir()
    for process in ranks:
        process.start()
    try:
        _wait(ranks, job, deadline_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return torch.load(Path(job.folder) / "outcome.pt", weights_only=False)


def _wait(ranks: list[Any], job: TrainerJob, deadline_s: float) -> None:
    running, deadline = list(ranks), time.monotonic() + deadline_s
    while running:
        ready = wait([process.sentinel for process in running], timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise JobFailed(f"not finished after {deadline_s:.0f} s (--deadline-s)")
        running = [process for process in running if process.sentinel not in ready]
        if any(process.exitcode for process in ranks if process.sentinel in ready):
            errors = sorted(Path(job.folder).glob("error_*.txt"), key=lambda file: file.stat().st_mtime)
            raise JobFailed(errors[0].read_text().strip() if errors else "a process ended without a message")


def _rank_main(rank: int, job: TrainerJob) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child process"
    watch_parent(parent.sentinel)
    torch.set_num_threads(1)
    reference.be_quiet()
    try:
        stay_on_loopback()
        meeting = f"file://{Path(job.folder).absolute() / 'meeting'}"  # a rendezvous without a port
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=job.target.ranks)
        if job.before_build is not None:
            job.before_build()
        outcome = compute(rank, job)
    except BaseException as error:
        # Written before the process ends, because waiting ranks then report only a lost connection.
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc(limit=-4)
        (Path(job.folder) / f"error_{rank}.txt").write_text(text or type(error).__name__)
        os._exit(1)
    if rank == 0:
        torch.save(outcome, Path(job.folder) / "outcome.pt")
    dist.barrier()
    os._exit(0)


def compute(rank: int, job: TrainerJob) -> CaseOutcome:
    """Compute log-probs and one optimizer step, with the weights before and after it."""
    target = job.target
    create_backend = importlib.import_module(f"slime.backends.{target.backend}").create_backend
    args = default_args(
        hf_checkpoint=job.model,
        allow_unverified_model=True,
        train_backend=target.backend,
        dtype="float32",
        optimizer="sgd",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=0.0,
        **dict(target.settings),
    )
    backend = create_backend(args, rank=rank, world_size=target.ranks, device="cpu")
    buffers = buffers_of(backend.model.lm) if BACKENDS[target.backend].trains_transformers_model else {}
    layout = backend.layout
    ids = list(range(NUM_DOCUMENTS))[layout.dp_rank :: layout.dp_size]
    batch = documents(job.vocabulary, ids)
    half = -(-len(ids) // 2)
    halves = (range(half), range(half, len(ids)))
    mbs = [build_micro_batch(batch, part, {"advantages": batch["advantages"]}) for part in halves if part]
    lists = backend.log_probs(mbs, entropy=True)
    log_probs, entropy = (_by_document(values, ids) for values in (lists.log_probs, lists.entropy))
    before = _exported(backend)
    stats = backend.train_step(mbs, linear_loss(), DENOMINATORS)
    loss, norm, after = stats.metrics["loss"], stats.grad_norm, _exported(backend)
    return CaseOutcome(log_probs, entropy, loss, norm, before, after, buffers)


def _by_document(values: list[torch.Tensor], ids: list[int]) -> list[torch.Tensor]:
    """Gather the values of all ranks, in the order of the whole batch."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(zip(ids, values, strict=True)))
    found = {number: value for part in gathered for number, value in part.items()}
    return [found[number] for number in range(NUM_DOCUMENTS)]


def _exported(backend: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for bucket in backend.export() for name, tensor in bucket}
