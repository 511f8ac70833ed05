"""One trainer rank: a process that holds a shard of the model and does what the train group says."""

from __future__ import annotations

import concurrent.futures
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments import Args, RunInfo, plugin_args
from slime.backends import create_backend
from slime.backends.shared.old_policy import keep_versions
from slime.catalog.transports import TRANSPORTS
from slime.cluster.checkpoint import files_of_rank
from slime.cluster.delta_options import delta_options
from slime.cluster.run import Run
from slime.observability.logging_utils import configure_logger
from slime.runtime.base import fetch, in_background
from slime.step.agreement import Agreement
from slime.step.metrics import StepReport
from slime.step.training_step import TrainingStep
from slime.utils import accelerator
from slime.utils.checksums import FileRecord, find_damage, record_files
from slime.utils.errors import RunStopped
from slime.utils.finite import first_non_finite
from slime.utils.http_utils import get_host_info
from slime.utils.misc import load_function
from slime.utils.process_groups import open_store
from slime.weight_sync import LiveReport, LiveSender, Parcel, Sender, Target, live_sender_of, transport_of
from slime.weight_sync.base import NamedTensors, SenderOptions, nothing_after_writing
from slime.weight_sync.fp8 import engine_format, quantize_named, served_config
from slime.weight_sync.late_copy import LateCopySender
from slime.weight_sync.post_write import PostWrite
from slime.weight_sync.stage_turns import StagePlace, StageTurns

# What ranks wait for one that sends weights beyond its own wait for an engine.
_SENDER_SLACK_S = 60.0


class WeightsNotFinite(RunStopped):
    """The trainer's weights hold a NaN or an infinity: no engine gets them."""


class TrainActor:
    """Methods are called on all ranks at once (they are collectives), except `open_store` and `is_loaded`."""

    def __init__(self, args: Args, run: Run, rank: int, world_size: int):
        configure_logger()
        self._args, self._run = args, run
        # Functions of the user's may change their copy. Engines start beside the trainer,
        # so their addresses are not known here.
        self._plugin_args = plugin_args(
            args, RunInfo(run.run_id, str(run.run_dir), num_rollout=args.num_rollout)
        )
        self._rank, self._world_size = rank, world_size
        self._store: dist.Store | None = None
        self._sender: Sender | None = None
        self._live_sender: LiveSender | None = None
        self._turns: StageTurns | None = (
            None  # None: what is sent live, if anything, goes from every rank at once
        )
        self._saved_in = Path()  # the folder of the last checkpoint; set by `save`
        self._recording: concurrent.futures.Future | None = None  # of its checksums
        self._version: int | None = None  # of the current weights; None: engines never got any
        self._agreement = Agreement()

    def is_loaded(self) -> bool:
        """Answers when the process has what it runs on, torch first of all."""
        return True

    def open_store(self) -> int:
        """Rank 0: the meeting point of the ranks; returns its port."""
        self._store = open_store(self._run.host, self._world_size)
        return self._store.port

    def init(self, store_port: int, checkpoint: Path | None) -> dict[str, Any]:
        """Joins the other ranks, builds the model and loads weights; returns what the group wants to know."""
        timeout = datetime.timedelta(minutes=self._args.distributed_timeout_minutes)
        if self._store is None:
            self._store = dist.TCPStore(self._run.host, store_port, self._world_size, is_master=False)
        device = (
            torch.device(accelerator.device_type(), 0) if accelerator.device_count() else torch.device("cpu")
        )
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            self._args.distributed_backend or accelerator.process_group_backend(),
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        self._backend = create_backend(
            self._args, rank=self._rank, world_size=self._world_size, device=device
        )
        self._kept = keep_versions(self._args, self._backend)
        if checkpoint is not None:
            self._backend.load(checkpoint)
            if self._kept is not None and not self._args.finetune:
                self._kept.load(checkpoint)
        layout = self._backend.layout
        return {"dp_size": layout.dp_size, "dp_rank": layout.dp_rank, "cp_size": layout.cp_size}

    def open_sender(self, transport: str, engine_urls: tuple[str, ...]) -> None:
        """The first rank sends: `export` gives it whole tensors. Live transports
        send from more ranks, in their own ways.

        After a live push the first rank leaves a copy on disk, for engines that come late.
        """
        for url in engine_urls:
            self._run.engine_token.use_for(url)
        live, self._content = TRANSPORTS[transport].live, TRANSPORTS[transport].content
        self._post_write = self._load_post_write(engine_urls)
        self._quantization = (
            served_config(self._policy_path) if self._args.rollout_quantization == "fp8" else None
        )
        self._fp8 = engine_format(self._policy_path, self._quantization)
        self._dither_seed = self._args.seed if self._args.fp8_rounding == "stochastic" else None
        if live:
            self._open_live(transport)
        if self._rank == 0:
            make_sender = LateCopySender if live else transport_of(transport).make_sender
            self._sender = make_sender(self._sender_options())

    def _open_live(self, transport: str) -> None:
        layout, every_rank = self._backend.layout, TRANSPORTS[transport].every_rank
        if every_rank or layout.is_first_of_stage:
            self._live_sender = live_sender_of(transport)(self._sender_options())
        if not every_rank:
            place = StagePlace(layout.pp_rank, layout.pp_size, layout.is_first_of_stage)
            self._turns = StageTurns(
                place, self._live_sender, self._args.update_weight_timeout_s + _SENDER_SLACK_S
            )

    def _load_post_write(self, engine_urls: tuple[str, ...]) -> PostWrite | None:
        path = self._args.custom_update_weight_post_write_path
        return PostWrite(load_function(path), self._plugin_args, engine_urls, self._rank) if path else None

    def _sender_options(self) -> SenderOptions:
        folder = Path(self._args.update_weight_disk_dir or self._run.run_dir / "weights")
        adapter = self._backend.adapter_config() if self._content == "adapter" else None
        return SenderOptions(
            self._run.shm_prefix,
            folder,
            self._policy_path,
            self._rank,
            self._own_address(),
            self._args.update_weight_timeout_s,
            self._backend.layout.pp_rank,
            quantization=self._quantization,
            adapter_config=adapter,
            keep_files=self._args.update_weight_disk_keep_files,
            delta=delta_options(self._args, self._run),
            after_writing=self._post_write or nothing_after_writing,
        )

    @property
    def _policy_path(self) -> str:
        """What engines of the policy start from."""
        return self._args.engine_topology.policy.model_path

    def _own_address(self) -> str:
        """As engines reach it: the first rank is where the run listens, others may be on other machines."""
        return self._run.host if self._rank == 0 or self._run.host == "127.0.0.1" else get_host_info()[1]

    def train(self, rollout_id: int, ref: Any) -> StepReport:
        step = TrainingStep(
            self._backend,
            self._plugin_args,
            rollout_id,
            fetch(ref),
            weight_version=self._version,
            kept=self._kept,
            agreement=self._agreement,
        )
        report = step.run()
        if self._version is not None:
            self._version += (
                1  # the weights have moved on, whether or not they are pushed before the next batch
            )
        return report

    def export(self, version: str, dtype: str | None) -> Parcel | None:
        """The model or its adapters, bucket by bucket, into the
        transport; the first rank returns the parcel.
        """
        self._version = int(version.rpartition(":")[2])
        self.note_push(self._version)
        for bucket in self._stream(dtype):
            if self._sender is not None:
                self._sender.send(self._as_engines_hold(bucket))
        parcel = self._sender.finish(version) if self._sender is not None else None
        if self._post_write is not None:
            self._post_write.on_every_rank(parcel.written if parcel is not None else None)
        return parcel

    def note_push(self, number: int) -> None:
        """The current weights are what engines sample with as version
        `number`, or did in the run that is replayed.
        """
        if self._kept is not None:
            self._kept.note_push(number)

    def send_live(self, version: str, dtype: str | None, targets: tuple[Target, ...]) -> LiveReport | None:
        """The whole model, bucket by bucket, to engines that wait for
        it; a rank that sends nothing returns None.
        """
        if self._turns is not None:
            buckets = self._backend.export_stage(dtype=_torch_dtype(dtype))
            if self._live_sender is not None:
                buckets = map(self._as_engines_hold, buckets)
            return self._turns.send(version, targets, buckets)
        self._live_sender.open(version, targets)
        for bucket in self._stream(dtype):
            self._live_sender.send(self._as_engines_hold(bucket))
        return self._live_sender.finish()

    def _stream(self, dtype: str | None) -> Iterator[NamedTensors]:
        """What the transport carries, bucket by bucket: the model, or its adapters alone. A collective."""
        export = self._backend.export_adapter if self._content == "adapter" else self._backend.export
        return export(dtype=_torch_dtype(dtype))

    def _as_engines_hold(self, bucket: NamedTensors) -> NamedTensors:
        """In FP8 where the engines' checkpoint is. Engines other
        than ours would take a NaN without a word.
        """
        broken = first_non_finite(bucket)
        if broken is not None:
            raise WeightsNotFinite(
                f"{broken} has values that are not finite numbers: these weights are not pushed."
            )
        if self._fp8 is None or self._content == "adapter":
            return bucket
        return list(quantize_named(bucket, self._fp8, self._dither_seed))

    def find_damage(self, folder: Path, files: dict[str, FileRecord]) -> list[str]:
        """Which of these files of a checkpoint are not what was written;
        before `init`, and by each rank for its share.
        """
        return find_damage(folder, files)

    def save(self, path: Path) -> None:
        self._saved_in, self._recording = path.parent, None
        self._backend.save(path)
        if self._kept is not None and self._rank == 0:
            self._kept.save(path)

    def finish_save(self, wait: bool) -> dict[str, FileRecord] | None:
        """Size and checksum of every file that this rank wrote; None: it
        is still writing, or reading them again.
        """
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

    def move(self, params: str, optimizer: str) -> None:
        """`"device"`: this rank's own; `"cpu"`: off it."""
        place = {"device": str(self._device), "cpu": "cpu"}
        self._backend.move(params=place[params], optimizer=place[optimizer])

    def take_peak_memory(self) -> int | None:
        """Bytes in use on this rank's device at their most since the last call; None on a CPU machine."""
        return accelerator.take_peak_memory()

    def close(self) -> None:
        for sender in (self._live_sender, self._sender):
            if sender is not None:
                sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None
