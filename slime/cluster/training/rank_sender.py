"""Sends one trainer rank's share of the weights to the transport in a weight push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime.arguments import Args, PluginArgs
from slime.backends.shared.trainer_base import TrainBackend
from slime.catalog.deadlines import timeout_s
from slime.catalog.quantizations import QUANTIZATIONS
from slime.catalog.transports import TRANSPORTS
from slime.engines.external import read_address
from slime.utils.errors import RunStopped
from slime.utils.http_utils import is_loopback
from slime.utils.machine.ports import address_towards
from slime.utils.machine.run_identity import LOOPBACK, Run
from slime.utils.misc import load_function
from slime.utils.models.finite import first_non_finite
from slime.utils.models.model_config import read_config
from slime.utils.plugin_errors import place_of
from slime.weight_sync.base import (
    DeltaOptions,
    LiveReport,
    LiveSender,
    NamedTensors,
    Sender,
    SenderOptions,
    Target,
    WeightBundle,
)
from slime.weight_sync.disk import DiskSender
from slime.weight_sync.stage_turns import StageTurns
from slime.weight_sync.transports import live_sender_of, transport_of

# What ranks wait for one that sends weights beyond its own wait for an engine.
_SENDER_SLACK_S = 60.0


class RankSender:
    """Sends weights from a trainer rank. Construction and every push are collective calls of all ranks.

    The first rank sends: `TrainBackend.export` gives it whole tensors. Live transports send from more ranks,
    in their own ways; the first rank then writes files only when an engine needs them.
    """

    def __init__(
        self,
        args: Args,
        plugin_args: PluginArgs,
        run: Run,
        rank: int,
        backend: TrainBackend,
        transport: str,
        engine_urls: tuple[str, ...],
    ):
        self._args, self._run, self._rank, self._backend = args, run, rank, backend
        self._plugin_args = plugin_args
        self.know_engines(engine_urls)
        live, self._content = TRANSPORTS[transport].live, TRANSPORTS[transport].content
        self._quantization, self._convert = self._conversion()
        self._live_sender: LiveSender | None = None
        self._turns: StageTurns | None = None  # None: what is sent live goes from every rank at once
        if live:
            self._open_live(transport)
        self._sender: Sender | None = None  # None: another rank sends
        if rank == 0:
            make_sender = DiskSender if live else transport_of(transport).make_sender
            self._sender = make_sender(self._sender_options())

    def _conversion(self) -> tuple[dict[str, Any] | None, Callable[[NamedTensors], NamedTensors] | None]:
        """Return the engines' quantization_config, and what converts tensors; None: neither is needed."""
        args, folder = self._args, self._policy_path
        row, config = QUANTIZATIONS.get(args.rollout_quantization), None
        if row is not None:
            config = load_function(f"{row.code}.engine_config")(args.rollout_engine, folder)
        elif self._content == "adapter" or not read_config(folder).get("quantization_config"):
            return None, None
        seed = args.seed if args.fp8_rounding == "stochastic" else None
        # Without a flag engines serve the checkpoint's own format, which is FP8.
        code = (row or QUANTIZATIONS["fp8"]).code
        return config, load_function(f"{code}.make_converter")(folder, config, seed)

    def know_engines(self, urls: tuple[str, ...]) -> None:
        """Learn the addresses of all engines, again when one has joined or left."""
        self._engine_urls = urls
        for url in urls:
            self._run.engine_token.use_for(url)

    def _open_live(self, transport: str) -> None:
        layout, every_rank = self._backend.layout, TRANSPORTS[transport].every_rank
        if every_rank or layout.is_first_of_stage:
            self._live_sender = live_sender_of(transport)(self._sender_options())
        if not every_rank:
            deadline_s = timeout_s(self._args, "update-weight") + _SENDER_SLACK_S
            self._turns = StageTurns(layout.pp_rank, layout.pp_size, self._live_sender, deadline_s)

    def _sender_options(self) -> SenderOptions:
        return SenderOptions(
            self._run.shm_prefix,
            Path(self._args.update_weight_disk_dir or self._run.run_dir / "weights"),
            self._policy_path,
            self._rank,
            self._own_address(),
            timeout_s(self._args, "update-weight"),
            self._backend.layout.pp_rank,
            quantization=self._quantization,
            adapter_config=self._backend.adapter_config() if self._content == "adapter" else None,
            keep_files=self._args.update_weight_disk_keep_files,
            delta=_delta_options(self._args, self._run),
            after_writing=self._after_writing,
        )

    @property
    def _policy_path(self) -> str:
        """Return the model that engines of the policy start from."""
        path = self._args.engine_topology.policy.model_path
        assert path is not None, "engines that get weights serve a model"
        return path

    def _own_address(self) -> str:
        """Return the address by which engines reach this rank; loopback where all are on this machine."""
        if self._run.host != LOOPBACK:
            return self._run.own_host
        hosts = (urlsplit(url).hostname or LOOPBACK for url in self._engine_urls)
        elsewhere = next((host for host in hosts if not is_loopback(host)), None)
        return address_towards(elsewhere) if elsewhere is not None else LOOPBACK

    def export(self, version: str, dtype: str | None) -> WeightBundle | None:
        """Send the model or its adapters; the first rank returns the bundle."""
        for bucket in self._stream(dtype):
            if self._sender is not None:
                self._sender.send(self._in_engine_format(bucket))
        bundle = self._sender.finish(version) if self._sender is not None else None
        if self._args.custom_update_weight_post_write_path is not None:
            # Only the first rank wrote, so only it knows the folder.
            folder = [bundle.written if bundle is not None else None]
            dist.broadcast_object_list(folder, src=0)
            assert folder[0] is not None, "a transport without a folder has nothing to call this for"
            self._after_writing(folder[0])
        return bundle

    def _after_writing(self, folder: Path) -> None:
        """Call the user's function after weights were written and before engines read them.

        It may make the folder visible to engines without a shared file system: upload a version, commit a
        volume, or drop a cache.
        """
        path = self._args.custom_update_weight_post_write_path
        if path is None:
            return
        try:
            load_function(path)(self._plugin_args, str(folder), list(self._engine_urls))
        except Exception as error:
            raise RunStopped(
                f"--custom-update-weight-post-write-path raised on rank {self._rank} for {folder}: "
                f"{type(error).__name__}: {error}; the engines were not notified of these weights.\n"
                f"  at {place_of(error, path)}"
            ) from error

    def send_live(self, version: str, dtype: str | None, targets: tuple[Target, ...]) -> LiveReport | None:
        """Send the whole model to engines that wait for it; None: this rank sends nothing."""
        if self._turns is not None:
            buckets = self._backend.export_stage(dtype=_torch_dtype(dtype))
            if self._live_sender is not None:
                buckets = map(self._in_engine_format, buckets)
            return self._turns.send(version, targets, buckets)
        assert self._live_sender is not None, "a live push over a transport that is not live"
        self._live_sender.open(version, targets)
        for bucket in self._stream(dtype):
            self._live_sender.send(self._in_engine_format(bucket))
        return self._live_sender.finish()

    def _stream(self, dtype: str | None) -> Iterator[NamedTensors]:
        """Yield the model, or its adapters alone, bucket by bucket. A collective."""
        export = self._backend.export_adapter if self._content == "adapter" else self._backend.export
        return export(dtype=_torch_dtype(dtype))

    def _in_engine_format(self, bucket: NamedTensors) -> NamedTensors:
        """Convert a bucket to the engines' FP8 or INT4, if any. RunStopped: a value is not finite."""
        broken = first_non_finite(bucket)
        if broken is not None:
            raise RunStopped(
                f"{broken} has values that are not finite numbers: these weights are not pushed."
            )
        return bucket if self._convert is None or self._content == "adapter" else self._convert(bucket)

    def close(self) -> None:
        for sender in (self._live_sender, self._sender):
            if sender is not None:
                sender.close()


def _delta_options(args: Args, run: Run) -> DeltaOptions | None:
    """Return what the flags say about deltas of the weights; None: whole weights are sent."""
    if args.update_weight_mode != "delta":
        return None
    engines = [read_address(address) for address in args.rollout_external_engine_addrs or ()]
    agents = [read_address(address, "--weight-agent-addrs") for address in args.weight_agent_addrs or ()]
    local = args.update_weight_local_checkpoint_dir
    return DeltaOptions(
        local=Path(local or run.run_dir / "local-weights"),
        remove_local=local is None and not args.update_weight_disk_keep_files,
        encoding=args.update_weight_delta_encoding,
        checksum=args.update_weight_delta_checksum,
        agents=dict(zip(engines, agents, strict=False)),  # no agents at all: engines read this machine's disk
    )


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None
