"""`slime dashboard RUN [RUN...]`: show one or several runs in a browser, live or after they ended."""

import argparse
import asyncio
import contextlib
import os
import signal
import stat
import sys
import tarfile
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import web

from slime import dashboard
from slime.cli.bounded_numbers import between
from slime.cli.inspect import command
from slime.dashboard.access import Access
from slime.dashboard.run_folder import open_runs
from slime.dashboard.server import Page
from slime.record import record_file
from slime.utils.files.folder_lock import is_locked
from slime.utils.files.restricted import FOR_OWNER, restricted

DEFAULT_PORT = 8123
ADDRESS_FILE = "dashboard_address"
_SWITCH_S = 0.0005  # Python's switch interval: how long a request waits for a thread that computes


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if not options.run and not options.demo:
        raise ValueError("give the folder of a run, or --demo for one that ships with slime")
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        folders = [*options.run, *([stack.enter_context(demo_run())] if options.demo else [])]
        if options.beside:
            _become_a_follower(folders[0], over)
        sys.setswitchinterval(_SWITCH_S)
        page = Page(open_runs(folders), Access(options.host), may_act=not options.demo)
        try:
            asyncio.run(_serve(page, options, over))
        except OSError as error:
            raise ValueError(
                f"--host {options.host} --port {options.port}: {error.strerror}; try another --port (0 takes "
                "any free one)."
            ) from None
    return 0


def _become_a_follower(folder: Path, ended: threading.Event) -> None:
    """Wait until the run that started this process has a folder, and end when its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # training comes first

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        ended.set()

    threading.Thread(target=wait_for_the_end, name="run-watch", daemon=True).start()
    while not ended.wait(0.2) and not is_locked(folder, "--run-dir"):
        pass
    while not ended.wait(0.2) and not record_file(folder).is_file():
        pass
    if ended.is_set():
        sys.exit(0)


@contextlib.contextmanager
def demo_run() -> Iterator[Path]:
    """Unpack a small recorded run into a temporary folder."""
    packed = Path(dashboard.__file__).parent / "demo" / "demo.tar.xz"
    with tempfile.TemporaryDirectory(prefix="slime-demo-") as name:
        with tarfile.open(packed) as archive:
            # An attribute, because the argument needs Python 3.11.4.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extractall(name)
        yield Path(name) / "demo"


async def _serve(page: Page, options: argparse.Namespace, over: threading.Event) -> None:
    host, runner = options.host, web.AppRunner(page.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, options.port).start()
        except OSError:
            if options.port != DEFAULT_PORT:
                raise
            await web.TCPSite(runner, host, 0).start()  # the default port is in use; take any free one
        address = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}/"
        with contextlib.ExitStack() as kept:
            text = f"dashboard of {', '.join(page.runs)}: {address}"
            if page.may_act or page.access.asks_everybody:
                folder = next(iter(page.runs.values())).path
                file = kept.enter_context(kept_address(folder, f"{address}#token={page.access.token}"))
                need = "to open it" if page.access.asks_everybody else "to use actions"
                text += f" ({need}, open the address in {file}, which only you can read)"
            print(text, flush=True)
            print("Press Ctrl-C to stop the dashboard.", flush=True)
            if options.open:
                webbrowser.open(address)  # without the token: other users can read command lines
            # Ctrl-C ends the run of a follower, which then ends this process.
            for number in (signal.SIGTERM,) if options.beside else (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, over.set)
            while not over.is_set():
                await asyncio.sleep(0.2)
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def kept_address(folder: Path, address: str) -> Iterator[Path]:
    """Keep the address with its token in a file that only the user can read.

    It is in the run folder, or in a temporary folder where the run belongs to another user or the file system
    has no permissions. The terminal must not show it, because `driver.log` keeps the terminal's output.
    """
    with contextlib.ExitStack() as stack:
        file = folder / ADDRESS_FILE
        if not _write_for_owner(file, address):
            file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-"))) / ADDRESS_FILE
            _write_for_owner(file, address)
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                if file.read_text().strip() == address:  # else another dashboard has replaced it
                    file.unlink()


def _write_for_owner(file: Path, address: str) -> bool:
    """Write the file by one rename; return False if that fails or others could read it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(restricted(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FOR_OWNER), "w") as opened:
            is_private = stat.S_IMODE(os.fstat(opened.fileno()).st_mode) == FOR_OWNER
            opened.write(f"{address}\n" if is_private else "")
        if is_private:
            temporary.replace(file)
        return is_private
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime dashboard", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("run", nargs="*", type=Path, metavar="RUN", help="folder of a run, or one with several runs in it")
    others = "others can connect to any but a loopback address, with the token"
    add("--host", default="127.0.0.1", help=f"address to listen on; {others}. Default: %(default)s")
    add(
        "--port",
        type=between(0, 65535, int),
        default=DEFAULT_PORT,
        help="default: %(default)s, or any free port",
    )
    add("--demo", action="store_true", help="show a small recorded run that ships with slime")
    add("--beside", action="store_true", help=argparse.SUPPRESS)  # set by `slime train --dashboard`
    add("--open", action="store_true", help="open a browser")
    return parser
