"""Every deadline of a run: the rows of `--timeouts NAME=SECONDS,...`."""

from typing import Any

from slime.catalog.named_numbers import NamedNumber

DEADLINES: dict[str, NamedNumber] = {
    "generate": NamedNumber(1800, "one generation request, or one call of your reward function", gt=0),
    "custom-generate": NamedNumber(7200, "one call of your generate function", gt=0),
    "reward": NamedNumber(10, "one check of a built-in reward, which is then killed", gt=0),
    "judge": NamedNumber(120, "one judgement, all retries included", gt=0),
    "env": NamedNumber(60, "one call of an environment", gt=0),
    "episode": NamedNumber(0, "one episode, which then ends with the turns it has; 0: no limit", ge=0),
    "engine-start": NamedNumber(1800, "until a starting engine serves requests", gt=0),
    "trainer-start": NamedNumber(3600, "until all trainer ranks have done a part of their start", gt=0),
    "engine-silence": NamedNumber(
        10, "without a heartbeat before an engine is replaced (x 12 while it computes); 0: never", ge=0
    ),
    "no-engine": NamedNumber(600, "without any live engine before the run stops", gt=0),
    "health-check": NamedNumber(30, "until a probe of --use-fault-tolerance counts as failed", gt=0),
    "update-weight": NamedNumber(600, "one request of a weight sync; then the engine is evicted", gt=0),
    "host": NamedNumber(600, "for a host at the start to provide devices, start a process and reply", gt=0),
    "collective": NamedNumber(600, "one collective of torch.distributed", gt=0),
    "worker-silence": NamedNumber(
        60, "without a heartbeat before a process counts as lost (x 12 while it computes); 0: never", ge=0
    ),
    "restart-wait": NamedNumber(600, "for a lost machine to be replaced; then the run ends", ge=0),
    "hang": NamedNumber(
        1800, "without progress before the run ends with stacks (x 12 while it computes); 0: never", ge=0
    ),
    "router-request": NamedNumber(14400, "one request through SGLang's own router", gt=0),
}
# Flags of other releases: the deadline that each sets, and its unit in seconds.
DEADLINE_FLAGS = {
    "--distributed-timeout-minutes": ("collective", 60),
    "--rollout-health-check-timeout": ("health-check", 1),
    "--sglang-router-request-timeout-secs": ("router-request", 1),
}


def timeout_s(args: Any, name: str) -> float:
    """Return a deadline of the run in seconds."""
    return float(args.timeouts.get(name, DEADLINES[name].default))
