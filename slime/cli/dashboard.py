"""`slime dashboard RUN [RUN...]`: the page of one run or several, in a browser, live or after their end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from slime.dashboard.access import Access
from slime.dashboard.run_folder import NotARun, open_runs
from slime.dashboard.server import Page

DEFAULT_PORT = 8123


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        runs = open_runs(options.run)
    except NotARun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    access = Access(options.host)
    page = Page(runs, access)
    try:
        asyncio.run(_serve(page, options.host, options.port, open_browser=options.open))
    except OSError as error:
        print(
            f"error: --host {options.host} --port {options.port}: {error.strerror}; another --port may be "
            "free (0 takes any).",
            file=sys.stderr,
        )
        return 2
    return 0


async def _serve(page: Page, host: str, port: int, *, open_browser: bool) -> None:
    runner = web.AppRunner(page.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except OSError:
            if port != DEFAULT_PORT:
                raise
            site = web.TCPSite(runner, host, 0)  # nobody asked for this very port
            await site.start()
        assert site._server is not None
        bound = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound}/#token={page.access.token}"
        print(f"page of {', '.join(page.runs)}: {address}", flush=True)
        print("(the token in it is for actions, and for readers on other machines; Ctrl-C ends the page)")
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(address)
        ended = asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(NotImplementedError):
                    asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime dashboard", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a folder with several runs in it",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address lets others in, who need the token. "
        "Default: %(default)s",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s, or a free one")
    parser.add_argument("--open", action="store_true", help="open a browser")
    return parser
