"""Notifies browsers of changes: it checks the files of each run every second while a browser is connected.

The requests that follow a notification cost CPU time, which a run on the same machine may need. So the more
they cost, the rarer notifications become: the dashboard uses `_SHARE` of one core for any number of browsers.
"""

import asyncio
import json
import time
from collections.abc import Mapping

from aiohttp import web

from slime.dashboard.run_folder import RunFolder
from slime.liveness.wait_table import read_table
from slime.record import record_file

LOOK_S = 1.0
_SHARE = 0.004  # of one core
_LONGEST_S = 15.0  # between two notifications, whatever they cost
_FILES = ("metrics.jsonl", "run.json", "labels.json", "logs/driver.log")


class Watch:
    """Checks all runs for all connected browsers; without one it does nothing."""

    def __init__(self, runs: Mapping[str, RunFolder]):
        self._runs, self._viewers = runs, set[asyncio.Queue[str]]()
        self._seen: dict[str, tuple[object, ...]] = {}
        self._task: asyncio.Task[None] | None = None

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the keys of changed runs to one browser until it disconnects."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        queue: asyncio.Queue[str] = asyncio.Queue(100)
        self._viewers.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._poll())
            # The first check records the current state; later changes are reported.
            await asyncio.get_running_loop().run_in_executor(None, self._changed)
        try:
            await response.write(b"event: hello\ndata: {}\n\n")
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), 15.0)
                    await response.write(f"event: changed\ndata: {data}\n\n".encode())
                except TimeoutError:
                    await response.write(b": still here\n\n")
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._viewers.discard(queue)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None
        return response

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        changed, notified, used = set[str](), time.monotonic() - _LONGEST_S, time.process_time()
        while True:
            changed.update(await loop.run_in_executor(None, self._changed))
            pause_s = min((time.process_time() - used) / _SHARE, _LONGEST_S)
            if changed and time.monotonic() - notified >= pause_s:
                data = json.dumps({"runs": sorted(changed)})
                changed, notified, used = set(), time.monotonic(), time.process_time()
                for queue in self._viewers:
                    if not queue.full():
                        queue.put_nowait(data)
            await asyncio.sleep(LOOK_S)

    def _changed(self) -> list[str]:
        changed = []
        for key, run in self._runs.items():
            table = read_table(run.path)
            # A run that hangs changes none of its files.
            found: list[object] = [run.state, table and (len(table.overdue), len(table.silent))]
            record = record_file(run.path)
            files = [run.path / name for name in _FILES]
            for file in (*files, record, record.with_name(f"{record.name}-wal")):
                try:
                    status = file.stat()
                    found.append((status.st_size, status.st_mtime_ns))
                except OSError:
                    found.append(None)
            now = tuple(found)
            if key in self._seen and self._seen[key] != now:
                changed.append(key)
            self._seen[key] = now
        return changed
