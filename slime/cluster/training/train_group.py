"""The trainer as the driver sees it: the processes of its ranks, and all ranks as one trainer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Generic

from slime.arguments import Args
from slime.backends.base import Layout
from slime.batch.split import split_for_ranks
from slime.catalog.deadlines import timeout_s
from slime.cluster.training.train_actor import RankProcess, TrainActor
from slime.liveness import phases
from slime.liveness.waits import WaitTimeout
from slime.runtime.base import Future, Handle, P, R, Renewable, Runtime, S, T, WorkerSpec, gather
from slime.runtime.placement import Slot, cores_each
from slime.step.step_report import StepReport
from slime.utils.errors import WorkerDied
from slime.utils.files.checksums import FileRecord, find_damage
from slime.utils.files.machine_copies import CopyPlace
from slime.utils.machine.children import thread_environment
from slime.utils.machine.process_groups import network_environment
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch

_ASK_S = 10.0  # a rank whether it is there
_NAMED = 4  # ranks in a message


class TrainerLost(WorkerDied):
    """Ranks were lost and are not replaced yet."""


@dataclass(slots=True)
class RankState:
    """Availability of the ranks. `away`: their processes were ended on purpose; calls reach nobody.

    `lost`: why they are gone, where that was not meant; calls fail until they are replaced.
    """

    away: bool = False
    lost: str | None = None
    count: int | None = None  # of the ranks that are there; None: all


class Ranks(Generic[T]):
    """Calls an object that exists on every trainer rank, on all at once; the first failure ends the call."""

    def __init__(self, handles: Sequence[Handle[T]], state: RankState | None = None):
        self._all, self._state = list(handles), state or RankState()

    @property
    def handles(self) -> list[Handle[T]]:
        return self._all[: self._state.count]

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return the results of all ranks; none in a run that does not train."""
        return gather(self.begin(method, *args, **kwargs))

    def begin(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[R]]:
        if self._state.lost is not None:
            raise TrainerLost(self._state.lost)
        handles = [] if self._state.away else self.handles
        return [handle.call(method, *args, **kwargs) for handle in handles]

    def part(self, owner: Callable[[T], S]) -> Ranks[S]:
        return Ranks([handle.part(owner) for handle in self._all], self._state)


class RankProcesses:
    """The trainer's processes before they hold a model; none in a run that does not train."""

    def __init__(self, args: Args, run: Run, runtime: Runtime, slots: tuple[Slot, ...]):
        self._args, self._runtime, self._run, self._slots = args, runtime, run, slots
        self._state = RankState()
        self._renewable = [Renewable(self._spawn(rank, args)) for rank in range(len(slots))]
        self._processes = Ranks(self._renewable, self._state)
        self._joined = False

    def _spawn(self, rank: int, args: Args) -> Handle[RankProcess]:
        threads = args.trainer_threads or cores_each(self._slots)
        env = {**thread_environment(threads), **network_environment(self._run.host)}
        env |= {name: str(value) for name, value in (args.train_env_vars or {}).items()}
        spec = WorkerSpec(f"trainer-{rank}", slot=self._slots[rank], env=env)
        run = replace(self._run, own_host=self._slots[rank].host)
        return self._runtime.spawn(spec, RankProcess, args, run, rank, len(self._slots))

    def find_damage(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Return which files of a checkpoint are damaged; the ranks share the reading."""
        handles = self._processes.handles
        if not handles:  # such a run reads the driver's own files alone
            return find_damage(folder, {name: record for name, record in files.items() if "/" not in name})
        by_size = sorted(files.items(), key=lambda file: file[1].num_bytes, reverse=True)
        shares = (dict(by_size[rank :: len(handles)]) for rank in range(len(handles)))
        pairs = zip(handles, shares, strict=True)
        calls = [handle.call(RankProcess.find_damage, folder, share) for handle, share in pairs]
        return [damage for found in gather(calls) for damage in found]

    @property
    def actors(self) -> Ranks[TrainActor]:
        """Return the ranks with their model; call it once the model is loaded."""
        return self._processes.part(RankProcess.actor)

    def join(self) -> None:
        """Join the ranks into process groups; a second call does nothing."""
        if self._processes.handles and not self._joined:
            with phases.starting("trainer"):
                self._join()

    def warm_up(self) -> None:
        """Let ranks do what is possible before there is room for their model."""
        self.join()
        self._call(RankProcess.warm_up)

    def load(self, checkpoint: Path | None) -> TrainGroup:
        """Join the ranks, then build and load the model."""
        layouts: list[Layout] = []
        self.join()
        if self._processes.handles:
            with phases.starting("model") as ended:
                layouts = self.reload(checkpoint)
                ended.note = f"from {checkpoint or self._args.hf_checkpoint}"
        return TrainGroup(self._args, self._runtime, self.actors, layouts)

    def _call(
        self, method: Callable[Concatenate[RankProcess, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return self._wait(method.__name__, self._processes.begin(method, *args, **kwargs))

    def _wait(self, phase: str, calls: list[Future[R]]) -> list[R]:
        """Return the results of a part of the start; WaitTimeout names the ranks and hosts that are late."""
        limit_s = timeout_s(self._args, "trainer-start")
        try:
            return gather(calls, limit_s)
        except WaitTimeout as error:
            pairs = zip(calls, self._slots, strict=False)
            late = [f"trainer-{slot.index} on {slot.host}" for call, slot in pairs if not call.done()]
            if not late:
                raise  # a rank itself waited in vain
            more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
            raise WaitTimeout(
                f"{', '.join(late[:_NAMED])}{more} did not finish `{phase}` of their start within "
                f"{limit_s:g} s (RUN/logs has what they did); hosts that load Python or a model from a cold "
                "network file system may need more: raise --timeouts trainer-start"
            ) from error

    def _join(self) -> None:
        """Wait for the processes, which then join each other at a port of the first."""
        self._call(RankProcess.is_loaded)
        [port] = self._wait("open_store", [self._processes.handles[0].call(RankProcess.open_store)])
        self._call(RankProcess.join, port)
        self._joined = True

    @property
    def away(self) -> bool:
        return self._state.away

    @property
    def lost(self) -> str | None:
        """Return why the ranks are gone; None: they are there, or were ended on purpose."""
        return self._state.lost

    def find_lost(self) -> list[WorkerDied]:
        """Return the errors of ranks whose process has ended or is given up."""
        handles = [] if self._state.away else self._processes.handles
        calls = [handle.call_control(RankProcess.is_loaded) for handle in handles]
        deadline, found = time.monotonic() + _ASK_S, []
        for call in calls:
            with contextlib.suppress(Exception):  # it is there: whatever it says is not asked for here
                try:
                    call.result(max(0.0, deadline - time.monotonic()))
                except WorkerDied as error:
                    found.append(error)
        return found

    def lose(self, cause: str) -> None:
        """End all processes: survivors would wait for ranks that will not come."""
        self.end()
        self._state.lost = cause

    def find(self) -> None:
        """Clear the loss before the ranks are replaced; calls reach nobody until then."""
        self._state.lost = None

    def end(self) -> None:
        """End the processes, which frees all their memory; calls reach nobody until `renew`."""
        self._state.away = True
        for handle in self._renewable:
            handle.kill()

    def move(self, slots: tuple[Slot, ...]) -> None:
        """Set where processes restart, at most as many as there were at first."""
        self._slots, self._state.count = slots, len(slots)
        self._run = replace(self._run, host=slots[0].host)

    def renew(self, settings: Args) -> None:
        """Replace the processes that ended; the new ones join each other."""
        for rank, handle in enumerate(self._renewable[: len(self._slots)]):
            handle.renew(self._spawn(rank, settings))
        self._state.away = False
        self._join()

    def reload(self, source: Path | CopyPlace | None) -> list[Layout]:
        return self._call(RankProcess.load, source)

    def copy_place(self, folder: Path) -> CopyPlace:
        """Return the place of a copy in that folder, for the present ranks."""
        return CopyPlace(folder, tuple(slot.machine for slot in self._slots))

    def complete_copy(self, place: CopyPlace, files: Mapping[str, FileRecord]) -> list[str]:
        """Let machines exchange missing files; return what none of them has."""
        return self._call(RankProcess.complete_copy, place, dict(files))[0]


class TrainGroup:
    """The ranks with their model. `layouts`: the place of each in the parallel dimensions."""

    def __init__(self, args: Args, runtime: Runtime, ranks: Ranks[TrainActor], layouts: Sequence[Layout]):
        self._args, self._runtime, self.ranks, self.layouts = args, runtime, ranks, layouts

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> StepReport:
        """Split the batch over the ranks, which train on it; return the report, which is the same on all.

        `batch` None, or no ranks: nothing learns (--debug-rollout-only).
        """
        if batch is None or not self.layouts:
            return StepReport({}, [], [])
        first = self.layouts[0]
        shares = split_for_ranks(self._args, batch, first.dp_size, cp_size=first.cp_size)
        refs = [self._runtime.put(share) for share in shares]
        try:
            pairs = zip(self.ranks.handles, self.layouts, strict=True)
            return gather([h.call(TrainActor.train, rollout_id, refs[lay.dp_rank]) for h, lay in pairs])[0]
        finally:
            for ref in refs:
                ref.drop()

    def score(self, batch: RolloutBatch) -> tuple[list[list[float]], float]:
        """Log-probs of each sample's response, which nothing learns from, and how far engines may differ."""
        first, whole = self.layouts[0], self._args.replace(global_batch_size=None)
        shares = split_for_ranks(whole, batch, first.dp_size, cp_size=first.cp_size)
        pairs = zip(self.ranks.handles, self.layouts, strict=True)
        answers = gather([handle.call(TrainActor.score, shares[layout.dp_rank]) for handle, layout in pairs])
        found: dict[int, list[float]] = {}
        for by_sample, _ in answers:
            found |= by_sample
        return [found[index] for index in batch["sample_indices"]], answers[0][1]
