"""Sandboxes in which the commands of a model run, on this machine or at a vendor's."""

from slime.agent.sandbox.base import (
    CommandFailed,
    ExecResult,
    FileContent,
    Limits,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.daytona import DaytonaSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.pool import BoxPool, open_sandbox, shared_pool

__all__ = [
    "BoxPool",
    "CommandFailed",
    "DaytonaSandbox",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "Limits",
    "LocalSandbox",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxUnavailable",
    "ensure_agent_user",
    "exec_and_wait",
    "open_sandbox",
    "shared_pool",
]
