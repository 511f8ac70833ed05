"""Sandboxes: where commands of a model run; the rows of `--sandbox`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """One kind of sandbox. `make`: its class, which gets the image."""

    make: str
    help: str
    is_local: bool = False  # sandboxes are processes of this machine, started ahead by a pool
    isolation: str | None = None  # of a local one; None: the best that works here
    package: str | None = None  # that has to be installed
    extra: str | None = None  # the extra of slime-rl that installs it
    key: str | None = None  # environment variable that the vendor's package reads
    # A function that returns how programs are isolated on this machine; RuntimeError: they cannot be.
    protection: str | None = field(default=None, repr=False)


SANDBOXES: dict[str, SandboxRow] = {
    "local": SandboxRow(
        "slime.agent.sandbox.local.LocalSandbox",
        "a protected sandbox on this machine: bubblewrap, else user namespaces, else an error",
        is_local=True,
        protection="slime.agent.sandbox.isolation.describe_protection",
    ),
    "plain": SandboxRow(
        "slime.agent.sandbox.local.LocalSandbox",
        "limits without protection: programs of the model can read your files and use your network",
        is_local=True,
        isolation="plain",
    ),
    "e2b": SandboxRow(
        "slime.agent.sandbox.e2b.E2BSandbox",
        "a sandbox of e2b.dev, or of a gateway with its protocol",
        package="e2b",
        extra="e2b",
        key="E2B_API_KEY",
    ),
    "daytona": SandboxRow(
        "slime.agent.sandbox.daytona.DaytonaSandbox",
        "a sandbox of daytona.io, or of your own Daytona server",
        package="daytona",
        extra="daytona",
        key="DAYTONA_API_KEY",
    ),
}
