"""The dashboard's web server: JSON about runs, computed on a few threads, and the static files."""

import asyncio
import concurrent.futures
import contextlib
import json
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from slime import __version__
from slime.catalog.actions import ACTIONS
from slime.dashboard import logs, sample_pages, timeline
from slime.dashboard.access import Access
from slime.dashboard.distributions import distributions
from slime.dashboard.live import Watch
from slime.dashboard.run_folder import RUNNING, RunFolder, explain
from slime.dashboard.trouble import trouble_of
from slime.record import RecordError
from slime.record.actions import ask, read_actions
from slime.record.labels import write_labels
from slime.utils.http_utils import is_loopback

_STATIC = Path(__file__).parent / "static"
_THREADS = 4
_MAX_CURVES, _MAX_SYSTEM = 64, 256
_SHOWN_RUNS = 32
_MAX_BODY = 16384
_WORTH_PACKING = 2000  # bytes
Answer = Callable[["Page", RunFolder, web.Request], Any]


class Page:
    """The dashboard of some runs. `may_act` False: read-only (the demo)."""

    def __init__(self, runs: Mapping[str, RunFolder], access: Access, *, may_act: bool = True):
        self.runs, self.access, self.may_act = runs, access, may_act
        self._files = {f"/{file.relative_to(_STATIC).as_posix()}": file for file in _STATIC.rglob("*")}
        self._files["/"] = _STATIC / "index.html"
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "page")
        self._watch = Watch(runs)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.access.middleware()], client_max_size=_MAX_BODY)
        app.router.add_get("/api/runs", self._list_runs)
        app.router.add_get("/api/events", self._watch.events)
        app.router.add_post("/api/runs/{run}/actions", self._act)
        for path, answer in _ANSWERS.items():
            app.router.add_get("/api/runs/{run}" + path, self._answering(answer))
        for path, file in self._files.items():
            if file.is_file():
                app.router.add_get(path, self._file)
        app.on_startup.append(self._warm_up)
        return app

    async def _warm_up(self, app: web.Application) -> None:
        """Read the curves before they are needed, in a thread that serves no requests."""
        threading.Thread(target=self._read_all, name="warm-up", daemon=True).start()

    def _read_all(self) -> None:
        for run in self.runs.values():
            with contextlib.suppress(OSError):  # reported by the request that needs them
                run.curves.read()

    async def _file(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(self._files[request.path], headers={"Cache-Control": "no-cache"})

    async def _list_runs(self, request: web.Request) -> web.Response:
        def read() -> dict[str, Any]:
            return {
                "version": __version__,
                "runs": [run.summary() for run in self.runs.values()],
                "shown": list(self.runs)[:_SHOWN_RUNS],  # the runs that are selected at first
                "may_act": self.may_act,
                "actions": {n: {**asdict(a), "high": None} for n, a in ACTIONS.items() if not a.of_engine},
            }

        return await self._in_thread(request, read)

    def _answering(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            run = self._run(request)
            return await self._in_thread(request, lambda: answer(self, run, request))

        return handle

    def _run(self, request: web.Request) -> RunFolder:
        run = self.runs.get(request.match_info["run"])
        if run is None:
            raise web.HTTPNotFound(text="this dashboard does not show such a run")
        return run

    async def _in_thread(self, request: web.Request, work: Callable[[], Any]) -> web.Response:
        """Wrap a handler: a read error becomes one sentence, None becomes 404."""

        def as_bytes() -> tuple[int, bytes]:
            try:
                found = work()
                status = 404 if found is None else 200
            except (RecordError, ValueError, OSError, OverflowError) as error:
                found, status = {"error": str(error)}, 400
            # No response contains the token, whatever file it was read from.
            return status, json.dumps(found, default=str).replace(self.access.token, logs.HIDDEN).encode()

        status, body = await asyncio.get_running_loop().run_in_executor(self._threads, as_bytes)
        response = web.Response(status=status, body=body, content_type="application/json")
        response.headers["Cache-Control"] = "no-store"
        if len(body) > _WORTH_PACKING and not is_loopback(request.remote or ""):
            response.enable_compression()
        return response

    async def _act(self, request: web.Request) -> web.Response:
        """Request an action of the run, or change its labels."""
        run = self._run(request)
        if not self.may_act:
            raise web.HTTPForbidden(text="this dashboard is read-only")
        try:
            body = await request.json()
            name, value = body["name"], body.get("value")
            value = float(value) if value is not None else None
            labels = ([str(tag) for tag in body["tags"]], str(body["note"])) if name == "label" else None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise web.HTTPBadRequest(text="an action is {name, value}, or {name, tags, note}") from None

        def write() -> dict[str, Any]:
            if labels is not None:
                return write_labels(run.path, *labels)
            if run.state != RUNNING:
                raise ValueError(f"the run is not active: {run.state}")
            return {"id": ask(run.path, str(name), value, "page")}

        return await self._in_thread(request, write)


def _metrics(page: Page, run: RunFolder, request: web.Request) -> Any:
    run.curves.read()
    summaries = [run.curves.summary(name) for name in run.curves.names()]
    return [{**found, **explain(found["name"])} for found in summaries if found is not None]


def _curves(page: Page, run: RunFolder, request: web.Request) -> Any:
    run.curves.read()
    query = request.query
    low, high = (float(query[name]) if query.get(name) else None for name in ("from", "to"))
    width = min(int(query.get("width", 800)), 4000)
    smooth = min(max(float(query.get("smooth", 0.0)), 0.0), 0.999)
    names = query.getall("name", [])[:_MAX_CURVES]
    by_time = query.get("x") == "time"
    found = [
        run.curves.series(name, width=width, smooth=smooth, by_time=by_time, low=low, high=high)
        for name in names
    ]
    return [series for series in found if series is not None]


def _system(page: Page, run: RunFolder, request: web.Request) -> Any:
    """Return one curve over time for each process and each of CPU, memory, GPU memory and GPU utilisation."""
    run.system.read()
    width = min(int(request.query.get("width", 400)), 2000)
    return [run.system.series(name, width=width, by_time=True) for name in run.system.names()[:_MAX_SYSTEM]]


def _samples(page: Page, run: RunFolder, request: web.Request) -> Any:
    query = request.query
    wanted = sample_pages.Wanted.of(query)
    limit, after = int(query.get("limit", 100)), query.get("after", "")
    with run.record() as connection:
        if wanted.contains is not None and wanted.step is None and wanted.order in ("made", "newest"):
            return sample_pages.search(connection, wanted, limit, int(after) if after else None)
        offset = max(0, int(query.get("offset", 0)))
        positions = run.positions
        return sample_pages.page(connection, wanted, positions, offset=offset, limit=limit, after=after)


def _of_record(query: Callable[[sqlite3.Connection, web.Request], Any]) -> Answer:
    """Return a handler that responds with the result of a query on the record."""

    def answer(page: Page, run: RunFolder, request: web.Request) -> Any:
        with run.record() as connection:
            return query(connection, request)

    return answer


def _actions(page: Page, run: RunFolder, request: web.Request) -> Any:
    with run.record() as connection:
        return [asdict(row) for row in read_actions(run.path, connection)[-200:]]


def _kind(request: web.Request) -> str:
    return request.query.get("kind", "train")


def _timeline(connection: sqlite3.Connection, request: web.Request) -> Any:
    known = timeline.steps_with_spans(connection)
    if known["last"] is None:
        return {**known, "lanes": [], "left_out": 0}
    last = int(request.query.get("to", request.query.get("step", known["last"])))
    first = int(request.query.get("from", last))
    return {**known, **timeline.spans_of(connection, first, last), "from": first, "to": last}


def _log(page: Page, run: RunFolder, request: web.Request) -> Any:
    file = logs.log_path(run.path, request.match_info["name"])
    if file is None:
        return None
    end = request.query.get("end")
    return logs.read_log(file, int(end) if end else None, request.query.get("q", ""), page.access.token)


_ANSWERS: dict[str, Answer] = {
    "": lambda page, run, request: {**run.details(), "trouble": trouble_of(run)},
    "/record": lambda page, run, request: run.record_facts(),
    "/metrics": _metrics,
    "/curves": _curves,
    "/system": _system,
    "/samples": _samples,
    "/samples/{row:[0-9]+}": _of_record(lambda db, asked: sample_pages.one(db, int(asked.match_info["row"]))),
    "/steps": _of_record(lambda db, asked: sample_pages.steps_of(db, _kind(asked))),
    "/prompts": _of_record(lambda db, asked: sample_pages.repeated_prompts(db, _kind(asked))),
    "/prompts/{hash:-?[0-9]+}": _of_record(
        lambda db, asked: sample_pages.history(db, int(asked.match_info["hash"]))
    ),
    "/distributions": _of_record(
        lambda db, asked: distributions(db, _kind(asked), asked.query.get("dataset") or None)
    ),
    "/outcomes": _of_record(lambda db, asked: sample_pages.outcomes(db)),
    "/timeline": _of_record(_timeline),
    "/settings": lambda page, run, request: run.settings(),
    "/logs": lambda page, run, request: logs.log_files(run.path),
    "/logs/{name}": _log,
    "/actions": _actions,
}
