"""Defines handles, futures and references: all that the cluster needs to know about where its parts run.

A call names the method itself, `handle.call(TrainActor.save, path)`, so that editors and type checkers follow
it; only the method's name and its arguments are sent, never code. A handle has two lanes: calls on one lane
run one after another, and lanes do not wait for each other, so that a health check never queues after a long
generation.
"""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from slime.liveness import waits
from slime.liveness.notes import Notes
from slime.runtime.placement import Placement, Slot
from slime.runtime.worker_main import CONTROL, WORK
from slime.utils.errors import WorkerDied

_LOOK_S = 0.25

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Describes where and how one object runs. `slot` None: on the driver's machine, without a device.

    `near_driver`: it may live in the driver's own process, where a debugger works; it then sees every device.
    `replaceable`: its owner starts another when it dies, so that its end is no failure of the run.
    `anywhere`: on the host that has the fewest such objects, and rather not where one has died.
    """

    name: str
    slot: Slot | None = None
    env: dict[str, str] = field(default_factory=dict)
    near_driver: bool = False
    replaceable: bool = False
    anywhere: bool = False


class Future(Protocol[R_co]):
    """The result of a call, available later. A `concurrent.futures.Future` is one too."""

    def done(self) -> bool: ...

    def result(self, deadline_s: float | None = None, /) -> R_co:
        """Return the result, or raise the exception of the call; `WorkerDied` if the process ended."""


class Ready(concurrent.futures.Future[R]):
    """A future whose result is there."""

    def __init__(self, value: R):
        super().__init__()
        self.set_result(value)


class Call(concurrent.futures.Future[R]):
    """The result of a method of the worker `target`; a wait for it has a name, and so has its timeout."""

    def __init__(self, target: str, method: str):
        super().__init__()
        self.name, self.target = f"{target}.{method}", target

    def result(self, timeout: float | None = None) -> R:
        if self.done():
            return super().result()
        with waits.waiting(self.name, deadline_s=timeout, target=self.target):
            try:
                return super().result(timeout)
            except TimeoutError:
                if self.done():
                    raise  # the call itself raised a TimeoutError
                raise waits.WaitTimeout(f"{self.name}: not done after {timeout} s") from None


class Handle(ABC, Generic[T]):
    """An object of class `T` that lives somewhere."""

    name: str

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a method on the work lane, after earlier calls."""
        return self.send(WORK, method.__name__, args, kwargs)

    def call_control(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Run a method on the control lane, whatever the work lane does."""
        return self.send(CONTROL, method.__name__, args, kwargs)

    def part(self, owner: Callable[[T], S]) -> Handle[S]:
        """Return a handle on the object that the method `owner` returns; that object stays where it is."""
        return _Part(self, owner.__name__)

    @abstractmethod
    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Start a call in the form that is sent; see `slime.runtime.worker_main.invoke`."""

    @abstractmethod
    def kill(self) -> None:
        """End the process of the object, if it has one of its own."""


class _Part(Handle[S]):
    """An object within the object of another handle."""

    def __init__(self, whole: Handle[Any], owner: str):
        self.name, self._whole, self._owner = whole.name, whole, owner

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._whole.send(lane, f"{self._owner}.{method}", args, kwargs)

    def kill(self) -> None:
        self._whole.kill()


class Renewable(Handle[T]):
    """A handle whose object may be recreated in another process; users of the handle need not know."""

    def __init__(self, current: Handle[T]):
        self.name, self._current = current.name, current

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._current.send(lane, method, args, kwargs)

    def kill(self) -> None:
        self._current.kill()

    def renew(self, current: Handle[T]) -> None:
        self._current = current


class Ref(Protocol[R_co]):
    """A value that any process of the run can load."""

    def load(self) -> R_co: ...

    def drop(self) -> None:
        """Free the value: it is no longer needed."""


class Runtime(Protocol):
    """Child processes of this one, or Ray actors. A runtime that is handed on spawns like the first."""

    def gpus_of_machine(self) -> int:
        """Return the number of GPUs of the machine that has most, now; 0: none has any."""

    def find_machines(self, wanted: int, num_gpus: int = 0) -> int:
        """Return the number of machines that a plan may use; wait for `wanted` where more can still join.

        `num_gpus`: on GPUs, machines with fewer do not count.
        """

    def claim(self, placement: Placement) -> Placement:
        """Reserve machines and devices for a plan until `close`; return the plan with their real names."""

    def relocate(self, slots: Sequence[Slot]) -> list[Slot | None]:
        """Return claimed places, on other machines where theirs are gone; None: there is none."""

    @property
    def driver_address(self) -> str:
        """The address by which the scheduler knows the driver's host."""

    def use_all_hosts(self) -> None:
        """Make every host of the cluster one of `other_hosts`, without claiming its devices."""

    @property
    def other_hosts(self) -> tuple[str, ...]:
        """Name and address of the hosts of the run other than the driver's, once devices are claimed."""

    def ask_other_hosts(
        self, question: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R | Exception]:
        """Call a function on each of `other_hosts`; return the results by host, or why there is none."""

    @property
    def failure(self) -> concurrent.futures.Future[None]:
        """Receives the error of a worker that died or is silent for too long, even if nobody waits."""

    def before_silence(self, explain: Callable[[WorkerDied], None]) -> None:
        """Call `explain` with the error of a silent worker while everybody still waits for it."""

    def forget_failure(self) -> None:
        """Replace `failure` by a new future: the lost worker has been replaced."""

    def spawn(self, spec: WorkerSpec, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Create an object of class `cls` where `spec` says; return at once."""

    def notes(self) -> dict[str, Notes]:
        """Return the last notes of each worker on its waits."""

    def dump_stacks(self) -> list[str]:
        """Ask every worker to write its stacks to its log; return the names of those asked."""

    def put(self, value: R) -> Ref[R]:
        """Store a value where every worker can load it."""

    def close(self) -> None:
        """End every worker; safe to call twice."""


def gather(futures: Sequence[Future[R]], deadline_s: float | None = None) -> list[R]:
    """Return all results, or raise the first failure: ranks that wait for a failed rank never answer."""
    if len(futures) == 1:
        return [futures[0].result(deadline_s)]
    several = cast(list[concurrent.futures.Future[R]], futures)
    names = list(dict.fromkeys(getattr(future, "name", "") for future in futures))
    targets = dict.fromkeys(getattr(future, "target", "") for future in futures)
    name = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
    with waits.waiting(name, deadline_s=deadline_s, target=", ".join(filter(None, targets))):
        done, left = concurrent.futures.wait(several, deadline_s, concurrent.futures.FIRST_EXCEPTION)
    for future in done:
        future.result()
    if left:
        raise waits.WaitTimeout(f"{name}: not done after {deadline_s} s")
    return [future.result() for future in several]


def result_or_failure(
    future: Future[R],
    failure: concurrent.futures.Future[None],
    meanwhile: Callable[[], object] = lambda: None,
) -> R:
    """Return the result of a future, or raise what `failure` gets meanwhile: the result would never come.

    `meanwhile` is called again and again during the wait.
    """
    name, target = getattr(future, "name", ""), getattr(future, "target", "")
    with waits.waiting(name, target=target), waits.quietly():
        while not failure.done():
            try:
                return future.result(_LOOK_S)
            except waits.WaitTimeout:
                if future.done():  # it came as the look ended, or the call itself timed out
                    return future.result(0)
                meanwhile()
    raise failure.exception() or AssertionError("a failure has an error")
