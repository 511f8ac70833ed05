"""One trainer rank: a process that holds a shard of the model and executes the driver's calls."""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
import resource
import shutil
import time
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from slime.arguments import Args, PluginArgs, RunInfo, plugin_args
from slime.arguments.core.draft import is_given
from slime.backends import create_backend
from slime.backends.base import Layout
from slime.backends.shared.microbatch import build_micro_batches
from slime.backends.shared.old_policy import old_policy_of
from slime.batch.split import RankData
from slime.catalog.deadlines import timeout_s
from slime.cluster.checkpoints.checkpoint import files_of_rank
from slime.cluster.training.rank_sender import RankSender
from slime.cluster.training.warm_up import warm_up
from slime.observability.logging_utils import configure_logger
from slime.observability.tracer import TRAINER, Span, spans_of_waits
from slime.record.additions import Advantage
from slime.runtime.base import Ref
from slime.step.agreement import Agreement, threshold_of
from slime.step.profiling import StepProfiler
from slime.step.step_report import StepReport
from slime.step.training_step import TrainingStep
from slime.utils.async_utils import in_background
from slime.utils.files.checksums import FileRecord, find_damage, record_files
from slime.utils.files.machine_copies import CopyPlace, complete, make_room, spread
from slime.utils.machine import accelerator
from slime.utils.machine.process_groups import limit_every_group, open_store, prefer_interface_of
from slime.utils.machine.run_identity import Run
from slime.weight_sync.base import WeightBundle

logger = logging.getLogger(__name__)

_MAX_TOKENS = 200_000  # of a step whose advantages are kept token by token


class RankProcess:
    """The process of a trainer rank before it has a model: reads checkpoints and joins the process group."""

    def __init__(self, args: Args, run: Run, rank: int, world_size: int):
        configure_logger(f" rank {rank}", level=args.log_level)
        self._args, self._run, self._rank, self._world_size = args, run, rank, world_size
        self._timeout = datetime.timedelta(seconds=timeout_s(args, "collective"))
        has_device = accelerator.device_count() > 0
        self._device = torch.device(accelerator.device_type(), 0) if has_device else torch.device("cpu")
        self._store: dist.Store | None = None  # on rank 0, once it is opened
        self._actor: TrainActor | None = None  # once it is loaded

    def is_loaded(self) -> bool:
        """Return once the process has loaded its modules, torch first of all."""
        return True

    def find_damage(self, folder: Path, files: dict[str, FileRecord]) -> list[str]:
        """Return which of these files of a checkpoint are not what was written."""
        return find_damage(folder, files)

    def open_store(self) -> int:
        """Open the store through which ranks find each other (rank 0); return its port."""
        self._store = open_store(self._run.host, self._world_size)
        return self._store.port

    def join(self, store_port: int) -> None:
        """Join the process group. A collective."""
        if self._store is None:
            self._store = dist.TCPStore(self._run.host, store_port, self._world_size, is_master=False)
        if self._device.type == "cuda":
            accelerator.gpu.set_device(self._device)
        prefer_interface_of(self._run.own_host)
        dist.init_process_group(
            self._backend_of_groups(),
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )

    def _backend_of_groups(self) -> str:
        """Return what --distributed-backend names, or what suits this rank: the driver may have no GPU."""
        if is_given(self._args.sources["distributed_backend"]):
            return self._args.distributed_backend
        return accelerator.collectives(self._device)

    def warm_up(self) -> None:
        """Prepare for the model what is possible while others hold the device."""
        if self._world_size == 1:
            warm_up(self._args, self._device)

    def complete_copy(self, place: CopyPlace, files: dict[str, FileRecord]) -> list[str]:
        """Complete the copy on every machine; return what none of them has. A collective."""
        return complete(place, self._rank, files)

    def load(self, source: Path | CopyPlace | None) -> Layout:
        """Build and load the model; return this rank's place. A collective."""
        folder = source.of(self._rank) if isinstance(source, CopyPlace) else source
        self._actor = TrainActor(self._args, self._run, self._rank, self._world_size, self._device, folder)
        limit_every_group(self._timeout)
        where = folder or self._args.hf_checkpoint
        logger.info("Rank %d of %d on %s has loaded %s", self._rank, self._world_size, self._device, where)
        return self._actor.layout

    def actor(self) -> TrainActor:
        assert self._actor is not None, "the rank is not loaded"
        return self._actor


@dataclass(frozen=True, slots=True)
class RankNotes:
    """A rank's report for the record of one step: its spans, the advantages it used, its histograms.

    Example: RankNotes([Span(3, "trainer-0", "train", 10.0, 12.0)], [Advantage(25, 0.7)])."""

    spans: list[Span] = field(default_factory=list)
    advantages: list[Advantage] = field(default_factory=list)
    histograms: list[dict[str, list[int]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Memory:
    """State of a rank besides its model. `version`: of its weights; None if engines never got any."""

    version: int | None
    agreement: Agreement


class TrainActor:
    """The rank with its model. Methods are called on all ranks at once: they are collectives."""

    def __init__(
        self,
        args: Args,
        run: Run,
        rank: int,
        world_size: int,
        device: torch.device,
        checkpoint: Path | None,
    ):
        self._args, self._run, self._rank = args, run, rank
        self._world_size, self._device = world_size, device
        # Functions of the user's may change their copy. Addresses of engines are not known yet.
        self._plugin_args = self._args_of_plugins(args.num_rollout)
        self._profiler = StepProfiler(args, rank)
        self._backend = create_backend(args, rank=rank, world_size=world_size, device=device)
        self._kept = old_policy_of(args, self._backend)
        if checkpoint is not None:
            self._backend.load(checkpoint)
            if self._kept is not None and not args.finetune:
                self._kept.load(checkpoint)
        self._sender: RankSender | None = None  # None: no engine gets weights, or none is known yet
        self._copies: set[Path] = set()  # of --peer-copies, in the memory of this machine
        self._saved_in = Path()  # the folder of the last checkpoint; set by `save`
        self._recording: concurrent.futures.Future[dict[str, FileRecord]] | None = None  # of its checksums
        self._version: int | None = None  # of the current weights; None: engines never got any
        self._agreement = Agreement()
        self._noted: TrainingStep | None = None  # the last step, until somebody asks for its notes

    @property
    def layout(self) -> Layout:
        return self._backend.layout

    def has_bfloat16(self) -> bool:
        """Return whether this rank's device computes in bfloat16; the driver may have another, or none."""
        return accelerator.has_bfloat16()

    def _args_of_plugins(self, num_rollout: int | None) -> PluginArgs:
        info = RunInfo(self._run.run_id, str(self._run.run_dir), num_rollout=num_rollout)
        return plugin_args(self._args, info)

    def expect_rollouts(self, num_rollout: int) -> None:
        """Set the length of a run whose data decides it (--num-epoch)."""
        self._plugin_args = self._args_of_plugins(num_rollout)
        self._backend.expect_steps(num_rollout * self._args.num_steps_per_rollout)

    def train(self, rollout_id: int, ref: Ref[RankData]) -> StepReport:
        """Take the optimizer steps of one rollout, on this rank's share of the batch."""
        step = TrainingStep(
            self._backend,
            self._plugin_args,
            rollout_id,
            ref.load(),
            weight_version=self._version,
            kept=self._kept,
            agreement=self._agreement,
            profiler=self._profiler,
        )
        started = time.monotonic()
        with self._profiler.rollout(rollout_id):
            report = step.run()
        self._noted = step if self._args.record_max_mib else None
        seconds = time.monotonic() - started
        logger.info("Rollout %d: %d step(s) in %.2f s", rollout_id, len(report.steps), seconds)
        if self._version is not None:
            self._version += 1  # the weights moved on, whether or not they are pushed before the next batch
        return report

    def score(self, share: RankData) -> tuple[dict[int, list[float]], float]:
        """Return log-probs at temperature 1 by sample, as engines score an input, and what may differ."""
        usual = self._plugin_args.rollout_temperature
        self._backend.change_setting("rollout_temperature", 1.0)
        try:
            with torch.compiler.set_stance("force_eager"):  # compiling for these few would take longer
                found = self._backend.log_probs(
                    build_micro_batches(share.batch, share.micro_batches)
                ).log_probs
        finally:
            self._backend.change_setting("rollout_temperature", usual)
        indices = share.batch["sample_indices"]
        by_sample = {index: values.tolist() for index, values in zip(indices, found, strict=True)}
        return by_sample, threshold_of(self._backend, self._args)

    def drain_notes(self) -> RankNotes:
        """Return the notes of the last step for the record; a second call has none."""
        step, self._noted = self._noted, None
        return RankNotes() if step is None else _notes_of(step, self._rank, self.layout)

    def change_setting(self, name: str, value: float) -> None:
        """Change a setting from the next step on, also for plug-ins."""
        self._plugin_args.change(name, value)
        if name in ("lr", "rollout_temperature"):
            self._backend.change_setting(name, value)

    # -- weights to engines

    def open_sender(self, transport: str, engine_urls: tuple[str, ...]) -> None:
        self._sender = RankSender(
            self._args, self._plugin_args, self._run, self._rank, self._backend, transport, engine_urls
        )

    def sender(self) -> RankSender:
        assert self._sender is not None, "weights are sent before it is known how"
        return self._sender

    def export(self, version: str, dtype: str | None) -> WeightBundle | None:
        """Send the weights as `version`, see `RankSender.export`."""
        self.note_version(int(version.rpartition(":")[2]))
        return self.sender().export(version, dtype)

    def note_version(self, number: int) -> None:
        """Note that engines know the current weights as version `number`."""
        self._version = number
        self.note_push(number)

    def note_push(self, number: int) -> None:
        """Note that engines sample with these weights, here or in the run that is replayed."""
        if self._kept is not None:
            self._kept.note_push(number)

    def memory(self) -> Memory:
        """Return what a checkpoint does not hold, for the process that replaces this one."""
        return Memory(self._version, self._agreement)

    def remember(self, memory: Memory) -> None:
        self._version, self._agreement = memory.version, memory.agreement

    # -- checkpoints and memory

    def save(self, path: Path) -> None:
        self._saved_in, self._recording = path.parent, None
        self._backend.save(path)
        if self._kept is not None and self._rank == 0:
            self._kept.save(path)

    def copy_state(self, place: CopyPlace) -> dict[str, FileRecord]:
        """Write what a checkpoint holds to the memory of the machines, in place of an older copy."""
        make_room(place, self._rank)
        path = place.of(self._rank)
        self._copies.add(path)
        self._backend.save(path)
        self._backend.finish_save(wait=True)
        if self._kept is not None and self._rank == 0:
            self._kept.save(path)
        return spread(place, self._rank)

    def finish_save(self, *, wait: bool) -> dict[str, FileRecord] | None:
        """Return size and checksum of every file that this rank wrote; None: it is not done yet."""
        if not self._backend.finish_save(wait=wait):
            return None
        if self._recording is None:
            names = files_of_rank(self._saved_in, self._rank, self._world_size)
            self._recording = in_background(
                lambda: record_files(self._saved_in, names, sync=True), "checksums"
            )
        return self._recording.result() if wait or self._recording.done() else None

    def save_hf(self, path: Path) -> None:
        self._backend.save_hf(path)

    def move(self, *, params: str, optimizer: str) -> None:
        """Move weights and moments to this rank's device ("device") or off it ("cpu")."""
        place = {"device": str(self._device), "cpu": "cpu"}
        self._backend.move(params=place[params], optimizer=place[optimizer])

    def empty_cache(self) -> None:
        """Free device memory that holds nothing."""
        accelerator.empty_cache()

    def resident_bytes(self) -> int:
        """Return the most host memory that this process has held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def drain_peak_memory(self) -> int | None:
        """Return the peak memory of this rank's device since the last call; None on a CPU machine."""
        return accelerator.drain_peak_memory()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._profiler.close()
        for path in self._copies:  # the driver cleans up its own machine alone
            shutil.rmtree(path, ignore_errors=True)
        dist.destroy_process_group()


def _notes_of(step: TrainingStep, rank: int, layout: Layout) -> RankNotes:
    """Collect them. Of the ranks that share samples, one reports the advantages."""
    spans = step.tracer.drain(lane=TRAINER.format(rank=rank)) + spans_of_waits(step.rollout_id)
    first = layout.tp_rank == layout.cp_rank == 0  # the last stage of a pipeline alone sees tokens
    tells = first and layout.pp_rank == 0
    return RankNotes(spans, _advantages(step) if tells else [], step.histograms if first else [])


def _advantages(step: TrainingStep) -> list[Advantage]:
    batch = step.batch
    lists, indices = batch.get("advantages"), batch.get("sample_indices")
    if not lists or not indices:
        return []
    by_token = sum(len(values) for values in lists) <= _MAX_TOKENS
    found = []
    for index, row, mask in zip(indices, lists, batch["loss_masks"], strict=True):
        values = row.tolist()  # in Python: a few numbers each, of hundreds of samples
        trained = list(compress(values, mask.tolist())) if len(mask) == len(values) else values
        if index is None or not trained:
            continue
        low, high = min(trained), max(trained)
        mean = low if high == low else fmean(trained)
        found.append(Advantage(int(index), mean, values if by_token and high - low > 1e-6 else None))
    return found
