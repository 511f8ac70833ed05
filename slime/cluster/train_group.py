"""The training stage as the driver sees it: all ranks as one trainer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.batch.split import split_for_ranks
from slime.cluster.run import Run
from slime.cluster.train_actor import TrainActor
from slime.runtime.base import Future, Handle, Runtime, WorkerSpec, gather
from slime.runtime.placement import Slot
from slime.step.metrics import StepReport
from slime.utils.checksums import FileRecord
from slime.utils.process_groups import network_environment
from slime.utils.processes import thread_environment
from slime.utils.types import RolloutBatch
from slime.weight_sync import LiveReport, Parcel, Target

_START_DEADLINE_S = 1800.0
_CLOSE_DEADLINE_S = 120.0  # overdue is a failure of the run: generous


class TrainGroup:
    """Splits a batch over the ranks and calls all of them; the first failure ends the call."""

    def __init__(self, args: Args, run: Run, runtime: Runtime, slots: tuple[Slot, ...]):
        self._args, self._runtime = args, runtime
        env = {**thread_environment(self._threads(slots)), **network_environment(run.host)}
        self._ranks: list[Handle] = [
            runtime.spawn(
                TrainActor,
                args,
                run,
                rank,
                len(slots),
                spec=WorkerSpec(name=f"trainer-{rank}", slot=slot, env=env),
            )
            for rank, slot in enumerate(slots)
        ]
        self._loaded: list[Future] = []  # of `start`: one for each rank

    def _threads(self, slots: Sequence[Slot]) -> int:
        """A share of a machine's cores."""
        crowd = max(Counter(slot.machine for slot in slots).values())
        return self._args.trainer_threads or max(1, (os.cpu_count() or 1) // crowd)

    def start(self, checkpoint: Path | None) -> None:
        self._loaded = [handle.call("is_loaded") for handle in self._ranks]
        gather(self._loaded, _START_DEADLINE_S)
        port = self._ranks[0].call("open_store").result(_START_DEADLINE_S)
        self._layouts = self._call("init", port, checkpoint, deadline_s=_START_DEADLINE_S)

    def describe_start(self) -> str:
        """How far `start` is."""
        if not self._loaded:
            return "trainer ranks wait for the engines"
        up = sum(future.done() for future in self._loaded)
        return (
            f"{up} of {len(self._ranks)} trainer ranks are up"
            if up < len(self._ranks)
            else "trainer ranks load the model"
        )

    def open_sender(self, transport: str, engine_urls: tuple[str, ...]) -> None:
        self._call("open_sender", transport, engine_urls)

    def train(self, rollout_id: int, batch: RolloutBatch) -> StepReport:
        """One rollout's optimizer steps; returns the report, which is the same on all ranks."""
        sizes = self._layouts[0]
        shares = split_for_ranks(self._args, batch, sizes["dp_size"], cp_size=sizes["cp_size"])
        refs = [self._runtime.put(share) for share in shares]
        try:
            futures = [
                handle.call("train", rollout_id, refs[layout["dp_rank"]])
                for handle, layout in zip(self._ranks, self._layouts, strict=True)
            ]
            return gather(futures)[0]
        finally:
            for ref in refs:
                self._runtime.drop(ref)

    def export(self, version: str, dtype: str | None) -> Parcel:
        return self._call("export", version, dtype)[0]

    def note_push(self, number: int) -> None:
        self._call("note_push", number)

    def send_live(self, version: str, dtype: str | None, targets: tuple[Target, ...]) -> LiveReport:
        """One report for all ranks: each that sends tells of the whole model, sent
        to engines of its own or in turns to all.
        """
        reports = [
            report for report in self._call("send_live", version, dtype, targets) if report is not None
        ]
        failures = {url: why for report in reports for url, why in report.failures.items()}
        return LiveReport(reports[0].num_tensors, reports[0].nbytes, failures)

    def save(self, path: Path) -> None:
        self._call("save", path)

    def finish_save(self, *, wait: bool) -> dict[str, FileRecord] | None:
        """The files that the ranks wrote; None: some still write
        what `save` began. `wait`: until they have.
        """
        written = self._call("finish_save", wait)
        if any(files is None for files in written):
            return None
        return {name: record for files in written for name, record in files.items()}

    def find_damage(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Files of a checkpoint that are not what was written. Ranks share
        them, and read them while engines start.
        """
        by_size = sorted(files, key=lambda name: files[name].num_bytes, reverse=True)
        shares = [
            {name: files[name] for name in by_size[rank :: len(self._ranks)]}
            for rank in range(len(self._ranks))
        ]
        calls = [
            handle.call("find_damage", folder, share)
            for handle, share in zip(self._ranks, shares, strict=True)
        ]
        return [damage for found in gather(calls) for damage in found]

    def save_hf(self, path: Path) -> None:
        self._call("save_hf", path)

    def move(self, *, params: str, optimizer: str) -> None:
        self._call("move", params, optimizer)

    def take_peak_memory(self) -> int | None:
        """Of the device that was fullest since the last call; None on a CPU machine."""
        peaks = [peak for peak in self._call("take_peak_memory") if peak is not None]
        return max(peaks, default=None)

    def close(self) -> None:
        self._call("close", deadline_s=_CLOSE_DEADLINE_S)

    def kill(self) -> None:
        """Ends the ranks, and gives back what they hold."""
        for handle in self._ranks:
            handle.kill()

    def _call(self, method: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        futures = [handle.call(method, *args) for handle in self._ranks]
        return gather(futures, deadline_s)
