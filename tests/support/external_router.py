"""A router that others run, as far as a run sees one: it lists, takes and drops workers, and forwards."""

import asyncio
import threading
from typing import Any

import aiohttp
from aiohttp import web
from fake_engine import FakeEngine


class OtherRouter:
    """Speaks what SGLang's router does about workers. A context: it serves within."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.workers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "OtherRouter":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> int:
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._forward)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": list(self.workers.values())})

    async def _add(self, request: web.Request) -> web.Response:
        worker = await request.json()
        self.workers[worker["url"]] = {**worker, "id": str(len(self.workers)), "is_healthy": True}
        return web.json_response({"status": "accepted"}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        for url, worker in list(self.workers.items()):
            if worker["id"] == request.match_info["id"]:
                del self.workers[url]
        return web.json_response({})

    async def _forward(self, request: web.Request) -> web.Response:
        url = next(iter(self.workers))
        body = await request.json()
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
            return web.json_response(await answer.json(), status=answer.status)


class RegisteredEngine(FakeEngine):
    """Also answers what the router asks of a worker that registers."""

    async def _serve(self) -> int:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/{path:.*}", self._describe)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": "org/model", "served_model_name": "org/model", "version": "0.5.23"}
        )
