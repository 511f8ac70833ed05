"""Command-line agents in a sandbox, with the adapter as their only endpoint: Claude Code and Codex.

Example: `await ClaudeCodeHarness().run(box, HarnessContext("/work", sid, url), "Make the tests pass.")`.
The session's id is the client's key, so its requests are turns of that session. The sandbox must have node
or get it (`SLIME_AGENT_NODE_TARBALL`), and must reach the adapter.
"""

from __future__ import annotations

import os
import shlex
from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime.agent.sandbox.base import Sandbox, exec_and_wait
from slime.utils.misc import SingletonMeta

_INSTALL_S = 600
_REMOTE_TARBALL = "/tmp/slime_agent_package.tgz"
_REMOTE_NODE = "/tmp/slime_agent_node.tar.gz"


@dataclass(frozen=True, slots=True)
class HarnessContext:
    """One episode of an agent program."""

    workdir: str  # in the sandbox
    session_id: str
    adapter_url: str  # as the sandbox reaches it, without /v1
    model_label: str = "slime-actor"


class _SingletonABC(SingletonMeta, ABCMeta):
    """Allows one object of each harness in a process, with abstract methods."""


class BaseHarness(metaclass=_SingletonABC):
    """Installs, configures and starts one agent program."""

    @abstractmethod
    async def install_cli(self, sandbox: Sandbox) -> None: ...

    @abstractmethod
    async def write_config(self, sandbox: Sandbox, context: HarnessContext) -> None: ...

    @abstractmethod
    async def launch_and_wait(
        self, sandbox: Sandbox, context: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        """Start the program and return its exit code; -1: it ran out of time."""

    async def run(
        self, sandbox: Sandbox, context: HarnessContext, prompt: str, time_budget_sec: float = 1800
    ) -> int:
        """Install, configure, start, wait."""
        await self.install_cli(sandbox)
        await self.write_config(sandbox, context)
        return await self.launch_and_wait(sandbox, context, prompt, time_budget_sec)


class NpmHarness(BaseHarness):
    """A program that npm installs and that finds its endpoint in the environment."""

    name: ClassVar[str]
    command: ClassVar[str]  # that must exist in the sandbox
    package: ClassVar[str]  # of npm
    variables: ClassVar[str]  # SLIME_AGENT_<variables>_TARBALL, _EXTRA_ARGS, _EXTRA_ENVS

    async def install_cli(self, sandbox: Sandbox) -> None:
        """Install the program unless it exists: from a tarball of this machine, or by name from npm."""
        if (await sandbox.exec(f"command -v {self.command}"))[0] == 0:
            return
        node, package = os.environ.get("SLIME_AGENT_NODE_TARBALL"), self.package
        if node and (await sandbox.exec("command -v npm"))[0] != 0:
            await sandbox.write_file(_REMOTE_NODE, Path(node))
            unpack = f"tar -xf {_REMOTE_NODE} -C /usr/local --strip-components=1"
            await sandbox.exec(unpack, timeout=_INSTALL_S, check=True)
        if tarball := os.environ.get(f"SLIME_AGENT_{self.variables}_TARBALL"):
            await sandbox.write_file(_REMOTE_TARBALL, Path(tarball))
            package = _REMOTE_TARBALL
        # npm itself retries downloads; the sandbox retries a connection that broke.
        command = f"npm install -g --fetch-retries=5 {shlex.quote(package)}"
        code, out, err = await sandbox.exec(command, timeout=_INSTALL_S, idempotent=True)
        if code != 0:
            raise RuntimeError(
                f"{self.name} could not be installed in the sandbox: {(err or out)[-500:]}; use an image "
                f"that has it, or set SLIME_AGENT_{self.variables}_TARBALL to its npm package"
            )

    async def write_config(self, sandbox: Sandbox, context: HarnessContext) -> None:
        """Write the files that the program reads; by default none."""

    @abstractmethod
    def command_line(self, context: HarnessContext, prompt: str) -> str: ...

    @abstractmethod
    def environment(self, context: HarnessContext) -> dict[str, str]: ...

    async def launch_and_wait(
        self, sandbox: Sandbox, context: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        """Start the program and return its exit code; -1: it ran out of time."""
        extra = (word.split("=", 1) for word in shlex.split(self._extra("ENVS")) if "=" in word)
        variables = {**self.environment(context), **dict(extra)}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        line = f"{self.command_line(context, prompt)} {self._extra('ARGS')}".strip()
        command = f"cd {shlex.quote(context.workdir)} && env {exports} {line} </dev/null"
        tag = f"{self.name}-{context.session_id}"
        return await exec_and_wait(sandbox, command, time_budget_sec, tag=tag)

    def _extra(self, what: str) -> str:
        return os.environ.get(f"SLIME_AGENT_{self.variables}_EXTRA_{what}", "")


class ClaudeCodeHarness(NpmHarness):
    """`claude -p`, which speaks Anthropic's messages."""

    name = "claude-code"
    command = "claude"
    package = "@anthropic-ai/claude-code"
    variables = "CC"
    tools: ClassVar[str] = "Bash Read Edit Write Glob Grep"

    def command_line(self, context: HarnessContext, prompt: str) -> str:
        # As root the program refuses --permission-mode bypassPermissions; a list of tools works for all.
        return (
            f"claude -p {shlex.quote(prompt)} --output-format stream-json --verbose "
            f"--allowedTools {shlex.quote(self.tools)}"
        )

    def environment(self, context: HarnessContext) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": context.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": context.session_id,
            "ANTHROPIC_MODEL": context.model_label,
            "ANTHROPIC_SMALL_FAST_MODEL": context.model_label,
            # No calls that are not part of the task, to hosts that the sandbox cannot reach.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": "3",
        }


class CodexHarness(NpmHarness):
    """`codex exec`, which speaks OpenAI's Responses and reads its endpoint from a file only."""

    name = "codex"
    command = "codex"
    package = "@openai/codex"
    variables = "CODEX"
    key_variable: ClassVar[str] = "SLIME_AGENT_KEY"

    @classmethod
    def config_text(cls, base_url: str, model_label: str) -> str:
        """Return config.toml, with everything off that needs other hosts than the adapter."""
        return f"""model = "{model_label}"
model_provider = "slime"
check_for_update_on_startup = false

[analytics]
enabled = false

[features]
plugins = false
apps = false
remote_plugin = false
unbounded_connection_retries = false

[model_providers.slime]
name = "slime"
base_url = "{base_url}"
env_key = "{cls.key_variable}"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2
"""

    def _home(self, context: HarnessContext) -> str:
        return f"{context.workdir}/.codex-{context.session_id}"

    async def write_config(self, sandbox: Sandbox, context: HarnessContext) -> None:
        text = self.config_text(f"{context.adapter_url}/v1", context.model_label)
        await sandbox.exec(f"mkdir -p {shlex.quote(self._home(context))}", check=True)
        await sandbox.write_file(f"{self._home(context)}/config.toml", text)

    def command_line(self, context: HarnessContext, prompt: str) -> str:
        # We are in a sandbox already: the program's own would only forbid commands.
        return f"codex exec --json --skip-git-repo-check -s danger-full-access {shlex.quote(prompt)}"

    def environment(self, context: HarnessContext) -> dict[str, str]:
        return {"CODEX_HOME": self._home(context), self.key_variable: context.session_id}
