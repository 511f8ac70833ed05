"""Runs objects in Ray actors; the only module that imports ray."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.arguments import Args
from slime.catalog.deadlines import timeout_s
from slime.liveness import stacks, usage, waits
from slime.liveness.notes import Notes, take_notes, working
from slime.liveness.vital_signs import Signs, signs_of
from slime.runtime import reports
from slime.runtime.base import Call, Handle, P, R, T, WorkerSpec
from slime.runtime.placement import Machine, Placement, Slot
from slime.runtime.reports import log_reports
from slime.runtime.worker_main import CONTROL, WORK, invoke, make_object
from slime.runtime.worker_watch import DEFAULT_LIMIT_S, RuntimeWithWorkers, WorkerHandle
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.machine.children import import_environment, last_lines, open_log
from slime.utils.machine.cores import num_cores
from slime.utils.machine.run_identity import LOOPBACK

logger = logging.getLogger(__name__)

DEFAULT_HOST_TIMEOUT_S = 600.0
_ANSWER_S = 30.0  # of a machine that is asked whether it is there
_JOINED_S = 1.0  # between two counts of the machines of a cluster
_STARTS = 4  # of a cluster for this run: Ray gives a node 30 s, which a busy machine may need
_PULSE = "pulse"
_LIFE = "life"
_SENT = {"_run_dir", "_silence_limit_s", "_host_timeout_s", "_driver_node", "_nodes", "_gpu_ids"}
_SENT |= {"_spreads", "_is_alone"}
_Found = tuple[str, str, tuple[int, ...], int]  # node, its address, our devices on it, its cores
_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.WorkerCrashedError,
)


def _join_or_start() -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one; RunStopped if that fails."""
    address = os.environ.get("RAY_ADDRESS")
    if address and "://" in address:
        raise RunStopped(
            f"RAY_ADDRESS={address} is an address for clients, and the driver of a run works inside the "
            "cluster: submit the run there (ray job submit --address http://HEAD:8265 -- python3 train.py), "
            "or start it on a machine of the cluster with RAY_ADDRESS=auto"
        )
    for again in reversed(range(1 if address else _STARTS)):
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
            return
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if not again:
                where = f"no Ray cluster answers at RAY_ADDRESS={address}" if address else "Ray did not start"
                raise RunStopped(f"{where}: {error}") from error
            logger.warning("Ray did not start (%s); retrying once.", error)


class _Actor:
    """Holds the object. Each lane, the heartbeats and its life have a concurrency group of their own."""

    def __init__(self, log: tuple[Path, str], folder: str):
        with contextlib.suppress(OSError):  # as in the driver, for code that opens relative paths
            os.chdir(folder)
        with contextlib.suppress(OSError), open_log(*log) as file:  # else Ray's own logs have it
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
        waits.name_process(log[1])
        usage.follow(log[1], os.getpid())
        reports.keep_reports()
        self._made: concurrent.futures.Future[Any] = concurrent.futures.Future()  # the object, or why not

    def make(self, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Create the object: Ray reports the error of a constructor only when the process has ended."""
        with working("start"):
            make_object(self._made, lambda: cls(*args, **kwargs))

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._made.result()
        with working(method):
            return invoke(target, method, args, kwargs)

    def pulse(self) -> tuple[str, int, Notes, list[reports.Report]]:
        """Return its node and process, its notes and its log records since the last call."""
        node = ray.get_runtime_context().get_node_id()
        return node, os.getpid(), take_notes(), reports.drain_reports()

    def live(self) -> None:
        """Never return: the call ends with the process, which Ray reports at once."""
        threading.Event().wait()

    def dump_stacks(self) -> None:
        """Write the stacks to stderr, its log."""
        if sys.__stderr__ is not None:
            stacks.write_own(sys.__stderr__)
        stacks.ask_children()


class RayHandle(WorkerHandle[T]):
    """An actor on one node, which creates its object with `_Actor.make`."""

    def __init__(self, spec: WorkerSpec, node_id: str, log: Path, make: tuple[Any, ...]):
        super().__init__(spec)
        self.node_id = node_id
        self._log, self._shows_warnings = log, spec.near_driver or spec.replaceable
        self._host = next((_host_name(node) for node in ray.nodes() if node["NodeID"] == node_id), node_id)
        devices = spec.slot.env if spec.slot is not None else {}
        actor_class = ray.remote(concurrency_groups={WORK: 1, CONTROL: 1, _PULSE: 1, _LIFE: 1})(_Actor)
        options = actor_class.options(
            num_cpus=0,
            num_gpus=0,  # placement names the devices; Ray's own bookkeeping would hide shared ones
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": {**spec.env, **devices, **import_environment()}},
        )
        self._actor = options.remote((log, spec.name), os.getcwd())
        self._making = self._actor.make.options(concurrency_group=WORK).remote(*make).future()
        self._node: str | None = None  # None: it has not answered yet
        self._pid = 0
        self._heard = False  # set by every answer, reset by the watch
        self._ask()
        life = self._actor.live.options(concurrency_group=_LIFE).remote()
        life.future().add_done_callback(lambda life: self.end.set_result(self.died(life.exception())))

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        call_id, call = self._begin(method)
        ref = self._actor.run.options(concurrency_group=lane).remote(method, args, kwargs)
        ref.future().add_done_callback(lambda answer: self._take(call_id, call.name, answer))
        return call

    def _take(self, call_id: int, name: str, answer: concurrent.futures.Future[Any]) -> None:
        """Pass on an answer; raise the same errors as a local process."""
        error = answer.exception()
        if error is None:
            self._answer(call_id, True, answer.result())
        elif isinstance(error, _DEATHS):
            self._answer(call_id, False, self.died(error))
        else:
            cause = getattr(error, "cause", None)
            cause = cause if isinstance(cause, Exception) else error
            cause.add_note(f"in {name} on {self._host}:\n{error}")
            self._answer(call_id, False, cause)

    def died(self, error: BaseException) -> WorkerDied:
        """Return the error of its end, with the last lines of its log where that can be read from here."""
        lines = last_lines(self._log)
        return WorkerDied(f"{self.name} on {self._host}: {error}; last lines of {self._log}:\n{lines}")

    def _ask(self) -> None:
        self._is_asked = True
        self._actor.pulse.options(concurrency_group=_PULSE).remote().future().add_done_callback(self._place)

    def _place(self, answer: concurrent.futures.Future[tuple[str, int, Notes, list[reports.Report]]]) -> None:
        if answer.exception() is None:  # else it died, which `end` reports
            self._node, self._pid, self.notes, logged = answer.result()
            log_reports(self.name, logged, warnings=self._shows_warnings)
            self._heard = True
        self._is_asked = False

    def dump_stacks(self) -> None:
        self._actor.dump_stacks.options(concurrency_group=_PULSE).remote()

    def kill(self) -> None:
        self.ended_here = True
        ray.kill(self._actor)

    # ---- what the watch over heartbeats asks ---------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{self.name} (pid {self._pid} on {self._host})"

    async def heard(self, timeout_s: float) -> bool:
        """Return whether it answered; it may be silent until its object exists, while torch is loaded."""
        if not self._is_asked:
            self._ask()
        heard, self._heard = self._heard, False
        return heard or not self._making.done()

    def signs(self) -> Signs | None:
        here = self._node == ray.get_runtime_context().get_node_id()
        return signs_of([self._pid]) if here else None


@dataclass(frozen=True, slots=True)
class ObjectRef(Generic[R]):
    """A value in Ray's object store, wrapped in a tuple so that Ray does not resolve it on the way."""

    inner: tuple[Any]

    def load(self) -> R:
        value: R = ray.get(self.inner[0])
        return value

    def drop(self) -> None:
        """Do nothing: the object store frees a value with its last reference."""


class RayRuntime(RuntimeWithWorkers[RayHandle[Any]]):
    """Spawns actors in the cluster that `RAY_ADDRESS` names, or in one started for this run.

    GPUs are held by a placement group with a bundle per machine. Actors then take a place on a bundle's node
    and name its devices themselves, so that engines and ranks may share them.
    """

    def __init__(
        self,
        run_dir: Path,
        silence_limit_s: float = DEFAULT_LIMIT_S,
        host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S,
    ):
        self._owns_ray = not ray.is_initialized()
        super().__init__(run_dir, silence_limit_s)
        self._host_timeout_s = host_timeout_s
        if self._owns_ray:
            _join_or_start()
        self._driver_node: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[str] = [self._driver_node]  # of each machine of the plan
        self._spreads, self._is_alone = False, True  # the latter: no other host is used
        self._missing: set[int] = set()  # machines that did not answer when they were last needed
        self._group: PlacementGroup | None = None
        self._gpu_ids: list[tuple[int, ...]] = []  # of each machine, as they were claimed

    def __getstate__(self) -> dict[str, Any]:
        """Leave out Ray and the devices: an actor that starts others owns only those."""
        return {name: value for name, value in self.__dict__.items() if name in _SENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(state["_run_dir"], state["_silence_limit_s"])
        self.__dict__.update(state, _owns_ray=False, _group=None, _missing=set())

    def gpus_of_machine(self) -> int:
        """Return what Ray knows: the driver's machine may have no GPU, as the head of a cluster often is."""
        return max(map(_num_gpus, _alive_nodes()), default=0)

    def find_machines(self, wanted: int, num_gpus: int = 0) -> int:
        """Wait for machines that join a cluster after the run was started, as under a job scheduler."""
        found, deadline = _count_machines(num_gpus), time.monotonic() + self._host_timeout_s
        if found < wanted and os.environ.get("RAY_ADDRESS"):
            logger.warning(
                "The run needs %d machines and the Ray cluster has %d: waiting up to %g s for more to join "
                "(--timeouts host).",
                *(wanted, found, self._host_timeout_s),
            )
            with waits.waiting(f"{wanted} machines in the Ray cluster", deadline_s=self._host_timeout_s):
                while found < wanted and time.monotonic() < deadline:
                    time.sleep(_JOINED_S)
                    found = _count_machines(num_gpus)
        return found

    def claim(self, placement: Placement) -> Placement:
        needs, self._spreads = placement.gpus_of_machines, placement.spreads
        if any(needs):
            return placement.on(self._claim_gpus(needs))
        # Nodes without GPUs, the driver's first.
        self._nodes = sorted(_addresses(), key=lambda node: (node != self._driver_node, node))[: len(needs)]
        return placement.on(self._machines([((), 0)] * len(needs)))

    def _claim_gpus(self, needs: tuple[int, ...]) -> list[Machine]:
        # A machine on which engines leave all GPUs free is held too.
        needs = tuple(max(1, needed) for needed in needs)
        have = sorted(map(_num_gpus, _alive_nodes()), reverse=True)
        if any(there < needed for there, needed in zip(have, sorted(needs, reverse=True), strict=False)):
            raise ValueError(
                f"the plan needs machines with {', '.join(map(str, needs))} GPUs, and those of the Ray "
                f"cluster have {', '.join(map(str, have))}: lower --actor-num-gpus-per-node or "
                "--rollout-num-gpus, or start Ray on more machines"
            )
        self._group = placement_group([{"GPU": needed} for needed in needs], strategy="STRICT_SPREAD")
        if not self._group.wait(self._host_timeout_s):
            raise RunStopped(
                f"the Ray cluster gave no machines with {', '.join(map(str, needs))} GPUs within "
                f"{self._host_timeout_s:g} s (--timeouts host): other jobs hold them (`ray status` says who)"
            )
        probes = [_probe_machine(self._group, bundle, needed) for bundle, needed in enumerate(needs)]
        found = ray.get(probes, timeout=self._host_timeout_s)
        self._nodes, self._gpu_ids = [node for node, *_ in found], [gpu_ids for _, gpu_ids, _ in found]
        return self._machines([(gpu_ids, cores) for _, gpu_ids, cores in found])

    def _machines(self, found: list[tuple[tuple[int, ...], int]]) -> list[Machine]:
        """Return the machines of the plan; loopback is enough if all are the driver's machine."""
        addresses = _addresses()
        self._is_alone = set(self._all_nodes()) == {self._driver_node}
        hosts = [LOOPBACK if self._is_alone else addresses[node] for node in self._nodes]
        return [Machine(host, *rest) for host, rest in zip(hosts, found, strict=True)]

    def relocate(self, slots: Sequence[Slot]) -> list[Slot | None]:
        """Replace each machine that does not answer by one that does and is not in use."""
        used = sorted({slot.machine for slot in slots})
        found = self._probe_machines(used) if self._group is not None else self._spare_nodes(used)
        self._missing = {machine for machine, node in found.items() if node is None}
        return [self._settle(slot, found[slot.machine]) for slot in slots]

    def _spare_nodes(self, machines: Sequence[int]) -> dict[int, _Found | None]:
        addresses = _addresses()
        found: dict[int, _Found | None] = {}
        answering = _answering(list(addresses))
        for machine in machines:
            node: str | None = self._nodes[machine]
            if node not in answering:
                node = next((other for other in answering if other not in self._nodes), None)
            if node is not None:
                self._nodes[machine] = node
            found[machine] = (node, addresses[node], (), 0) if node is not None else None
        return found

    def _probe_machines(self, machines: Sequence[int]) -> dict[int, _Found | None]:
        """Find bundles again: Ray moves those of a lost machine as soon as another has room for them."""
        assert self._group is not None, "asked by the caller"
        probes = [
            _probe_machine(self._group, machine, len(self._gpu_ids[machine])) if machine in machines else None
            for machine in range(len(self._nodes))
        ]
        ray.wait([one for one in probes if one is not None], num_returns=len(machines), timeout=_ANSWER_S)
        addresses = _addresses()
        found: dict[int, _Found | None] = {}
        for machine in machines:
            try:
                node, gpu_ids, cores = ray.get(probes[machine], timeout=0)
            except ray.exceptions.RayError:
                ray.cancel(probes[machine])
                found[machine] = None
                continue
            self._nodes[machine] = node
            found[machine] = (node, addresses[node], gpu_ids, cores)
        return found

    def _settle(self, slot: Slot, found: _Found | None) -> Slot | None:
        """Return the slot on the machine that was found; device numbers keep their order."""
        if found is None:
            return None
        _, address, gpu_ids, cores = found
        before = self._gpu_ids[slot.machine] if self._gpu_ids else ()
        devices = tuple(gpu_ids[before.index(gpu)] for gpu in slot.gpu_ids)
        return replace(slot, host=LOOPBACK if self._is_alone else address, gpu_ids=devices, cores=cores)

    @property
    def driver_address(self) -> str:
        return _addresses()[self._driver_node]

    def use_all_hosts(self) -> None:
        self._nodes = list(_addresses())

    @property
    def other_hosts(self) -> tuple[str, ...]:
        return tuple(_host_name(node) for node in self._other_nodes)

    @property
    def _other_nodes(self) -> list[dict[str, Any]]:
        missing = {self._nodes[machine] for machine in self._missing}
        ours = set(self._all_nodes()) - missing - {self._driver_node}
        return [node for node in _alive_nodes() if node["NodeID"] in ours]

    def ask_other_hosts(
        self, question: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R | Exception]:
        asked = {
            _host_name(node): _on_node(node["NodeID"], question, *args, **kwargs)
            for node in self._other_nodes
        }
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=self._host_timeout_s)
        answers: dict[str, R | Exception] = {}
        for host, task in asked.items():
            try:
                answers[host] = ray.get(task, timeout=0)
            except ray.exceptions.GetTimeoutError:
                answers[host] = TimeoutError(f"no answer within {self._host_timeout_s:g} s (--timeouts host)")
                ray.cancel(task)
            except ray.exceptions.RayError as error:
                answers[host] = error
        return answers

    def spawn(self, spec: WorkerSpec, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        node = self._least_used() if spec.anywhere else self._driver_node
        if spec.slot is not None:
            node = self._node_of(spec.slot)
        log = self.log_folder / f"{spec.name}.log"  # on the machine where it runs
        handle: RayHandle[T] = RayHandle(spec, node, log, (cls, args, kwargs))
        self._hold(handle)
        return handle

    def _all_nodes(self) -> list[str]:
        """Return the nodes of the plan, and those without GPUs where the plan lets objects go there."""
        more = [node["NodeID"] for node in _alive_nodes() if not _num_gpus(node)] if self._spreads else []
        return [*self._nodes, *more]

    def _least_used(self) -> str:
        """Return the node for an object that may go anywhere: the driver's, if all nodes have as many."""
        ours = [worker for worker in self._workers if worker.is_anywhere]
        lost = Counter(worker.node_id for worker in ours if worker.ended_here or worker.end.done())
        made = Counter(worker.node_id for worker in ours)
        nodes = [] if self._is_alone else [node for node in self._all_nodes() if node in _addresses()]
        return min([self._driver_node, *nodes], key=lambda node: (lost[node], made[node]))

    def _node_of(self, slot: Slot) -> str:
        """Return the node of a slot; a machine that has come back is another node at the same address."""
        known, addresses = self._nodes[slot.machine], _addresses()
        found = [node for node, address in addresses.items() if node == known or address == slot.host]
        if not found:
            raise WorkerDied(f"the host {slot.host} is not in the Ray cluster")
        return known if known in found else found[0]

    def dump_stacks(self) -> list[str]:
        handles = self._living()
        for handle in handles:
            handle.dump_stacks()
        return [handle.name for handle in handles]

    def put(self, value: R) -> ObjectRef[R]:
        return ObjectRef((ray.put(value),))

    def close(self) -> None:
        super().close()
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _num_gpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _count_machines(num_gpus: int) -> int:
    """Return the number of machines with at least as many GPUs."""
    return sum(_num_gpus(node) >= num_gpus for node in _alive_nodes())


def _addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}


def _answering(nodes: Sequence[str]) -> list[str]:
    """Return the nodes that run a task now: Ray takes a while to notice that a machine is gone."""
    tasks = {node: _on_node(node, _node_gpus_cores) for node in nodes}
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_ANSWER_S)
    found = []
    for node, task in tasks.items():
        try:
            ray.get(task, timeout=0)
            found.append(node)
        except ray.exceptions.RayError:  # also where it has not answered
            ray.cancel(task)
    return found


def _host_name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _on_node(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a task on a node; it gets no core of its own, so that it never waits for one."""
    options = ray.remote(function).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": import_environment()},
    )
    return options.remote(*args, **kwargs)


def _probe_machine(group: PlacementGroup, bundle: int, num_gpus: int) -> Any:
    """Ask for all devices of a bundle: only then does Ray report where it lies and which devices it holds."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    probe = ray.remote(_node_gpus_cores)
    return probe.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=place).remote()


def _node_gpus_cores() -> tuple[str, tuple[int, ...], int]:
    gpu_ids = tuple(sorted(int(gpu) for gpu in ray.get_gpu_ids()))
    return ray.get_runtime_context().get_node_id(), gpu_ids, num_cores()


def open_runtime(args: Args, run_dir: Path, shm_prefix: str) -> RayRuntime:
    return RayRuntime(run_dir, timeout_s(args, "worker-silence"), timeout_s(args, "host"))
