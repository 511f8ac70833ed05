"""What agent programs need of any sandbox: long commands that survive a broken connection, and a user."""

from __future__ import annotations

import asyncio
import shlex
import uuid

from slime.agent.sandbox.base import Sandbox

_POLL_S = 5.0
_TIMED_OUT = -1


async def exec_and_wait(
    sb: Sandbox,
    cmd: str,
    time_budget_sec: float,
    tag: str = "job",
    *,
    user: str = "root",
    env: dict[str, str] | None = None,
    poll_sec: float = _POLL_S,
) -> int:
    """Start a long command apart from the connection and look for its end: its exit code; -1: out of time.

    Its output is in /tmp/TAG-*.log of the box. A command out of time is ended with all that it started.
    """
    base = f"/tmp/{tag}-{uuid.uuid4().hex[:8]}"
    script = f"(\n{cmd}\n)\necho $? > {base}.tmp && mv {base}.tmp {base}.exit\n"
    await sb.write_file(f"{base}.sh", script, user=user)
    start = f"setsid bash {base}.sh > {base}.log 2>&1 < /dev/null & echo $! > {base}.pid"
    await sb.exec(start, user=user, env=env, check=True)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + time_budget_sec
    while True:
        code = (await sb.read_file(f"{base}.exit", user=user)).strip()
        if code:
            return int(code)
        left = deadline - loop.time()
        if left <= 0:
            kill = f"kill -9 -$(cat {base}.pid) 2>/dev/null; true"
            await sb.exec(kill, user=user, idempotent=True)
            return _TIMED_OUT
        await asyncio.sleep(min(poll_sec, left))


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """A user `agent` that owns the work folder and may use git in it, whoever made the files."""
    folder = shlex.quote(workdir)
    await sb.exec(
        "{ id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent; } && "
        f"mkdir -p /home/agent {folder} && chown -R agent:agent /home/agent {folder} && "
        "{ ! command -v git >/dev/null || git config --system --replace-all safe.directory '*'; }",
        user="root",
        check=True,
        timeout=60,
        idempotent=True,
    )
