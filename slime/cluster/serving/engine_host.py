"""Controls an engine from anywhere: the owner of its process lives on the machine of its devices.

The owner is an `EngineServer`, placed by the runtime: in this process, or in an actor on another machine.
It chooses the port, writes and reads the log and ends the process there. An engine ends with its owner. An
engine over several machines is a `HostedEngine` on each, which start and end together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from slime.engines.engine_process import EngineServer, LaunchPlan, MachineLost, Serving
from slime.liveness import waits
from slime.liveness.vital_signs import Signs
from slime.runtime.base import Future, Handle, gather
from slime.utils import http_utils
from slime.utils.errors import RunStopped, WorkerDied
from slime.wire.protocol import EngineInfo

_STOP_DEADLINE_S = 120.0
_SIGNS_DEADLINE_S = 5.0


class HostedEngine:
    """An engine in a fleet, wherever it runs. `own`: starts an owner on a port (0: any), again after a loss.

    `answer_s`: time limit for the host to start the owner, and for each of the owner's replies. `others`: the
    rest of an engine over several machines. This part alone serves, and none works without the others: all
    start together, and one that is lost or silent ends them all.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        own: Callable[[int], Handle[EngineServer]],
        answer_s: float,
        others: Sequence[HostedEngine] = (),
    ):
        self.plan, self._own, self._answer_s = plan, own, answer_s
        self._others, self.parts = others, [self, *others]
        self._owner = own(0)  # now, so that all come up beside each other
        self.ready: Future[Serving] | None = None  # from its start on
        self._end: Future[str] | None = None  # done when the process is, or its owner
        self._serving = Serving(plan.host, 0)

    @property
    def url(self) -> str:
        return self._serving.url

    @property
    def pid(self) -> int | None:
        return self._serving.pid

    @property
    def bootstrap_port(self) -> int | None:
        return self._serving.bootstrap_port

    def transports(self, info: EngineInfo) -> tuple[str, ...]:
        """Return the usable transports: shared memory needs the machine of the trainer's first rank."""
        reach = self.plan.beside_trainer
        return tuple(name for name in info.transports if reach or not name.endswith("shared_memory"))

    def launch(self, meeting_point: str = "") -> None:
        if self._end is not None:
            self.kill()  # what is left of an engine that lost a part
            try:
                self._end.result(self._answer_s)
            except WorkerDied:
                self._owner.kill()  # one that only keeps silent still has the engine, and its port
                try:
                    self._owner = self._own(self._serving.port)
                except WorkerDied as error:
                    raise MachineLost(str(error)) from error
        try:
            meeting_point = self._owner.call(EngineServer.launch, meeting_point).result(self._answer_s)
        except waits.WaitTimeout as error:
            raise RunStopped(
                f"{self.plan.name}: its host {self.plan.host} did not start a process within "
                f"{self._answer_s:g} s; a host that loads Python from a cold network file system may need "
                "more: raise --timeouts host"
            ) from error
        except WorkerDied as error:
            raise MachineLost(
                f"the machine of {self.plan.name} ({self.plan.host}) is lost: {error}"
            ) from error
        # In the order of the lane: the second begins when the first has ended.
        self.ready, self._end = (
            self._owner.call(EngineServer.wait_serving),
            self._owner.call(EngineServer.wait_end),
        )
        try:
            for other in self._others:
                other.launch(meeting_point)
        except RunStopped:
            self.kill()  # parts that have started would wait for the others
            raise

    def wait_ready(self) -> str:
        assert self.ready is not None, "wait_ready before launch"
        gather([part.ready for part in self.parts if part.ready is not None])  # which one fails first
        for other in self._others:
            other.wait_ready()
        self._serving = self.ready.result()  # its own deadline runs where the process does
        http_utils.authorize(self.url, self.plan.token)
        return self.url

    def alive(self) -> bool:
        return all(part._end is not None and not part._end.done() for part in self.parts)

    def signs(self) -> Signs | None:
        try:
            return self._owner.call_control(EngineServer.signs).result(_SIGNS_DEADLINE_S)
        except (WorkerDied, waits.WaitTimeout):
            return None

    def describe_end(self) -> str:
        for other in self._others:
            if not other.alive():
                return f"{other.describe_end()} ({other.plan.name} on {other.plan.host})"
        if self._end is None:
            return "was never started"
        try:
            return self._end.result(self._answer_s)
        except WorkerDied as error:
            return f"went with the process that owned it: {error}"

    def kill(self) -> None:
        for other in self._others:
            other.kill()
        with contextlib.suppress(WorkerDied):
            self._owner.call_control(EngineServer.kill).result(self._answer_s)
            if self._end is not None:
                self._end.result(self._answer_s)

    def stop(self) -> None:
        for other in self._others:
            other.stop()
        with contextlib.suppress(WorkerDied, waits.WaitTimeout):
            self._owner.call_control(EngineServer.stop).result(_STOP_DEADLINE_S)
        self._owner.kill()
