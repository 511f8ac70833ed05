"""Controls an engine from anywhere: the owner of its process lives on the machine of its devices.

The owner is an `EngineServer`, placed by the runtime: in this process, or in an actor on another machine.
It chooses the port, writes and reads the log and ends the process there. An engine ends with its owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from slime.engines.engine_process import EngineServer, LaunchPlan, MachineLost, Serving
from slime.liveness import waits
from slime.liveness.vital_signs import Signs
from slime.runtime.base import Future, Handle
from slime.utils import http_utils
from slime.utils.errors import RunStopped, WorkerDied
from slime.wire.protocol import EngineInfo

_STOP_DEADLINE_S = 120.0
_SIGNS_DEADLINE_S = 5.0


class HostedEngine:
    """An engine in a fleet, wherever it runs. `own`: starts an owner on a port (0: any), again after a loss.

    `answer_s`: time limit for the host to start the owner, and for each of the owner's replies.
    """

    def __init__(self, plan: LaunchPlan, own: Callable[[int], Handle[EngineServer]], answer_s: float):
        self.plan, self._own, self._answer_s = plan, own, answer_s
        self._owner = own(0)  # now, so that all come up beside each other
        self._ready: Future[Serving] | None = None
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

    def launch(self) -> None:
        if self._end is not None:
            try:
                self._end.result(self._answer_s)
            except WorkerDied:
                self._owner.kill()  # one that only keeps silent still has the engine, and its port
                self._owner = self._own(self._serving.port)
        try:
            self._owner.call(EngineServer.launch).result(self._answer_s)
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
        self._ready, self._end = (
            self._owner.call(EngineServer.wait_serving),
            self._owner.call(EngineServer.wait_end),
        )

    def wait_ready(self) -> str:
        assert self._ready is not None, "wait_ready before launch"
        self._serving = self._ready.result()  # its own deadline runs where the process does
        http_utils.authorize(self.url, self.plan.token)
        return self.url

    def alive(self) -> bool:
        return self._end is not None and not self._end.done()

    def signs(self) -> Signs | None:
        try:
            return self._owner.call_control(EngineServer.signs).result(_SIGNS_DEADLINE_S)
        except (WorkerDied, waits.WaitTimeout):
            return None

    def describe_end(self) -> str:
        if self._end is None:
            return "was never started"
        try:
            return self._end.result(self._answer_s)
        except WorkerDied as error:
            return f"went with the process that owned it: {error}"

    def kill(self) -> None:
        with contextlib.suppress(WorkerDied):
            self._owner.call_control(EngineServer.kill).result(self._answer_s)
            if self._end is not None:
                self._end.result(self._answer_s)

    def stop(self) -> None:
        with contextlib.suppress(WorkerDied, waits.WaitTimeout):
            self._owner.call_control(EngineServer.stop).result(_STOP_DEADLINE_S)
        self._owner.kill()
