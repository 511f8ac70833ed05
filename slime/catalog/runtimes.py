"""Runtimes: what `--runtime` chooses from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeRow:
    """One way to run processes. `create`: a function of settings, run folder and prefix of shared memory."""

    create: str
    package: str | None = None  # that it needs beyond slime's own dependencies


RUNTIMES = {
    "local": RuntimeRow("slime.runtime.local.open_runtime"),
    "ray": RuntimeRow("slime.runtime.on_ray.open_runtime", "ray"),
}
