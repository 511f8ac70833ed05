"""An agent process next to an engine, which keeps a copy of the weights and lets the engine load it.

It serves engines that share no disk with the trainer, or that somebody else runs. The engine needs no patch:
it loads a checkpoint folder. The publisher serves a published folder over HTTP to agents on other machines.

    POST /pull     {"version": "3f2a:7", "exact": false, "load": true}   -> it has (and serves) this version
    GET  /version                                                        -> of the copy, and of the engine
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.liveness import waits
from slime.utils import http_utils
from slime.utils.browser_guard import browser_guard, names_of_this_machine, token_guard
from slime.utils.errors import RunStopped
from slime.weight_sync.delta.local_copy import LocalCopy
from slime.weight_sync.delta.publication import INDEX, WANTED, DeltaSource, version_key
from slime.wire.control import EngineControl
from slime.wire.delta_codec import DeltaError
from slime.wire.delta_manifest import check_name

logger = logging.getLogger(__name__)

_ASK_DEADLINE_S = 1200.0  # longer than the agent's own wait for a version


class WeightAgent:
    """Manages one engine and its copy of the weights; handles one pull at a time."""

    def __init__(self, source: DeltaSource, local: Path, engine_url: str, deadline_s: float = 600.0):
        self._source, self._copy, self._deadline_s = source, LocalCopy(local), deadline_s
        self._engine = EngineControl(engine_url, _ASK_DEADLINE_S)
        self._one = asyncio.Lock()

    async def pull(self, version: str | None, *, exact: bool, load: bool) -> dict[str, Any]:
        """Bring the copy to the version, and the engine to the copy."""
        async with self._one:
            arrival = await asyncio.to_thread(
                self._copy.bring_to, self._source, version, exact=exact, deadline_s=self._deadline_s
            )
            if load:
                await self._engine.update_from_disk(str(arrival.folder), arrival.version)
        logger.info(
            "weights %s: %s, %d deltas, %d bytes read, %.2f s, %s",
            *(arrival.version, arrival.route, arrival.num_deltas, arrival.nbytes, arrival.seconds),
            "loaded" if load else "held",
        )
        return {"success": True, **asdict(arrival), "folder": str(arrival.folder)}

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/pull", self._pull), web.get("/version", self._version)])
        return app

    async def _pull(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read() or b"{}")
            version, exact, load = body.get("version"), body.get("exact", False), body.get("load", True)
            if version is not None:
                version_key(version)
            if not isinstance(exact, bool) or not isinstance(load, bool):
                raise ValueError("exact and load are true or false")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        try:
            return web.json_response(await self.pull(version, exact=exact, load=load))
        except (DeltaError, RunStopped, OSError, http_utils.HttpError, RuntimeError) as error:
            logger.error("The pull of weights %s failed: %s", version, error)
            message = f"{type(error).__name__}: {error}"
            return web.json_response({"success": False, "message": message}, status=500)

    async def _version(self, request: web.Request) -> web.Response:
        try:
            served = await self._engine.version()
        except (http_utils.HttpError, TimeoutError, KeyError):
            served = None  # it does not answer
        return web.json_response({"version": self._copy.version, "engine_version": served})


def serve(app: web.Application, host: str, port: int) -> None:
    """Serve until the process is stopped; prints its address first. Port 0: any free one. If other machines
    can connect, only clients with the token of the run's engines are served.
    """
    is_open = not http_utils.is_loopback(host)
    app.middlewares.append(browser_guard(known=None if is_open else names_of_this_machine()))
    if is_open:
        token = os.environ.get(http_utils.TOKEN_VARIABLE)
        if not token:
            raise ValueError(
                f"--host is {host}: other machines would reach weights and engines without being asked who "
                f"they are. Set {http_utils.TOKEN_VARIABLE} to a secret here and where its clients run, or "
                "use 127.0.0.1."
            )
        app.middlewares.append(token_guard(token))
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ValueError(
            f"--port {port} on --host {host} cannot be used ({error.strerror}); choose another."
        ) from error
    print(f"listening on http://{host}:{listener.getsockname()[1]}", flush=True)
    app.on_cleanup.append(lambda app: http_utils.close_session())
    web.run_app(app, sock=listener, print=None)


async def ask_agent(agent_url: str, version: str, *, load: bool) -> dict[str, Any]:
    """Ask for exactly this version: the trainer's push names the version that the engine must serve."""
    url = f"{agent_url.rstrip('/')}/pull"
    http_utils.authorize(url, os.environ.get(http_utils.TOKEN_VARIABLE))
    payload = {"version": version, "exact": True, "load": load}
    async with waits.limited(f"POST {url}", _ASK_DEADLINE_S):
        answer: dict[str, Any] = await http_utils.post(url, payload, max_retries=0)
        return answer


def publisher_app(folder: Path) -> web.Application:
    """Return an application that serves the published files of a folder, and nothing else."""

    async def index(request: web.Request) -> web.StreamResponse:
        return _file(folder / INDEX)

    async def file(request: web.Request) -> web.StreamResponse:
        name, wanted = request.match_info["folder"], request.match_info["file"]
        try:
            check_name(name)
            check_name(wanted)
        except DeltaError:
            raise web.HTTPNotFound from None
        if not name.startswith(("full-", "delta-")):
            raise web.HTTPNotFound
        return _file(folder / name / wanted)

    async def want_full(request: web.Request) -> web.Response:
        (folder / WANTED).touch()
        return web.json_response({"success": True})

    app = web.Application()
    app.add_routes(
        [web.get(f"/{INDEX}", index), web.get("/{folder}/{file}", file), web.post("/want_full", want_full)]
    )
    return app


def _file(path: Path) -> web.FileResponse:
    if not path.is_file():
        raise web.HTTPNotFound
    return web.FileResponse(path)
