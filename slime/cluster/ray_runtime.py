"""The Ray runtime: the same objects in Ray actors; the only module that imports ray."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from slime.arguments import Args
from slime.cluster.runtime import CONTROL, WORK, Handle, WorkerDied, WorkerSpec
from slime.utils import waits


class _Actor:
    """Holds the object; a concurrency group per lane."""

    def __init__(self, cls: type, args: tuple):
        self._target = cls(*args)

    @ray.method(concurrency_group=WORK)
    def work(self, method: str, args: tuple) -> Any:
        return getattr(self._target, method)(*args)

    @ray.method(concurrency_group=CONTROL)
    def control(self, method: str, args: tuple) -> Any:
        return getattr(self._target, method)(*args)


class RayFuture:
    """An object ref whose errors are those of the other runtime."""

    def __init__(self, ref: Any, name: str):
        self._ref, self._name = ref, name

    def done(self) -> bool:
        return bool(ray.wait([self._ref], timeout=0)[0])

    def result(self, deadline_s: float | None = None) -> Any:
        with waits.waiting(self._name, owner="driver", deadline_s=deadline_s):
            try:
                return ray.get(self._ref, timeout=deadline_s)
            except ray.exceptions.GetTimeoutError:
                raise waits.WaitTimeout(f"{self._name}: not done after {deadline_s} s") from None
            except ray.exceptions.RayActorError as error:
                raise WorkerDied(f"{self._name}: {error}") from error
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                cause.add_note(f"in {self._name}:\n{error}")
                raise cause from None


class RayHandle:
    """An actor."""

    def __init__(self, cls: type, args: tuple, spec: WorkerSpec):
        self.name = spec.name
        actor_class = ray.remote(concurrency_groups={WORK: 1, CONTROL: 1})(_Actor)
        options = actor_class.options(
            num_cpus=0,
            num_gpus=0,  # placement names the devices; Ray's own bookkeeping would hide shared ones
            max_restarts=0,
            runtime_env={"env_vars": {**spec.env, **spec.slot.env, "PYTHONPATH": os.pathsep.join(_python_path())}},
        )
        self._actor = options.remote(cls, args)

    def call(self, method: str, *args: Any, lane: str = WORK) -> RayFuture:
        remote = getattr(self._actor, lane)
        return RayFuture(remote.remote(method, args), f"{self.name}.{method}")

    def kill(self) -> None:
        ray.kill(self._actor)


def _python_path() -> list[str]:
    return list(dict.fromkeys(p or os.getcwd() for p in sys.path))


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A value in Ray's object store; wrapped in a list so that Ray does not resolve it on the way."""

    inner: tuple

    def load(self) -> Any:
        return ray.get(self.inner[0])


class RayRuntime:
    """Spawns actors in the cluster that `RAY_ADDRESS` names, or in one started for this run."""

    def __init__(self, args: Args, run_dir: Path):
        self._owns_ray = not ray.is_initialized()
        self._handles: list[Handle] = []
        if self._owns_ray:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")

    def spawn(self, cls: type, *args: Any, spec: WorkerSpec) -> Handle:
        handle = RayHandle(cls, args, spec)
        self._handles.append(handle)
        return handle

    def put(self, value: Any) -> ObjectRef:
        return ObjectRef((ray.put(value),))

    def drop(self, ref: ObjectRef) -> None:
        del ref  # the object store frees a value with its last reference

    def close(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.kill()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()
