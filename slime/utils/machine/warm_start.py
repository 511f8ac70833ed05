"""Children that start in milliseconds: forked from a *template*, a process that has imported what they need.

Half of a small run's start is imports, anew in each of its processes. The template has them, one thread, and
computes nothing: it is forked from its owner, which needs the same modules and has imported them by then, or
imports for itself where its owner has other threads. It forks twice, and the orphan goes to the process that
asked, which adopts orphans meanwhile: a real child of its own, with the environment, files, folder and
session that were asked for. Whatever the template cannot do is left to `exec`: another program, other
settings of imports, a template that is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import mmap
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.utils import waits
from slime.utils.machine.cores import num_cores
from slime.utils.machine.own_processes import protect
from slime.utils.machine.processes import Child, import_environment, thread_environment

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MALLOC_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
# Read while a library is loaded. What is set later is not what every thread of a process begins with.
_READ_WHEN_LOADED = (
    *("OMP_WAIT_POLICY", "KMP_BLOCKTIME"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
)
LONGEST, _MAX_FILES = 1 << 17, 64  # bytes and files of a request
_PATIENCE_S = 300.0  # for the imports of the template, on a busy machine
ROOM = "x" * 16_384  # the last argument of a template: memory for the command lines that its children show
_MAIN = re.compile(r"from ([\w.]+) import main; main\(\)")
# Read by packages while they are imported: where one of these differs, a process imports for itself.
_READ_AT_IMPORT = (
    *("HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "PYTHON", "LD_", "LANG", "LC_", "OMP_WAIT", "MALLOC_"),
)


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Any,
    pass_fds: Sequence[int],
    start_new_session: bool = False,
) -> Child:
    """Start a Python program that writes into `log` and reads nothing: warm where that is possible."""
    child = fork(command, env, log.fileno(), pass_fds, start_new_session) or subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=pass_fds,
        start_new_session=start_new_session,
    )
    return protect(child)


def fork(
    command: Sequence[str],
    env: Mapping[str, str],
    log: int,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> WarmChild | None:
    """The same from the template alone, once that has imported what it is for; None: it cannot."""
    template = _template
    if template is None:
        return None
    return template.start(list(command), dict(env), log, list(pass_fds), start_new_session)


@contextlib.contextmanager
def warm_starts(modules: Sequence[str], *, own: Sequence[str] | None = None) -> Iterator[None]:
    """Within this block children start from a template that has imported `modules`.

    `own`: what this process needs besides; it imports all of it now, and the template is forked from it.
    Nothing may be open that is removed at the exit: each child would do so. None: this process imports
    nothing, and the template is a program of its own.
    """
    global _template
    if Path("/dev/nvidiactl").exists() or not _has_pidfd():  # devices and forks do not go together
        yield
        return
    template = _template = Template(modules) if own is None else _fork_here([*modules, *own])
    try:
        yield
    finally:
        _template = None
        template.close()


def _has_pidfd() -> bool:
    """Linux has; an old one, and some that only look like it, refuse."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


# ---- the side that asks ------------------------------------------------------------------------------------


class WarmChild:
    """A child that a template forked; `poll`, `wait` and signals as of `subprocess.Popen`."""

    def __init__(self, pid: int, words: list[str]):
        self.pid, self.args, self.returncode = pid, words, None
        self._lock = threading.Lock()
        self._ended = os.pidfd_open(pid)

    returncode: int | None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._ended)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            watch = select.poll()
            with contextlib.suppress(OSError):  # closed meanwhile: it has ended
                watch.register(self._ended, select.POLLIN)
                watch.poll(None if timeout is None else 1000 * timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported `modules`, as seen from its owner; it ends when its owner does."""

    _process: Child

    def __init__(self, modules: Sequence[str], *, forked: bool = False):
        """`forked`: from this process, which has imported them and has no other threads."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_PATIENCE_S)
        self._environment = {**os.environ, **thread_environment(1), **import_environment()}
        self._lock = threading.Lock()
        with theirs:
            self._process = self._fork(theirs) if forked else self._execute(theirs, modules)

    def _execute(self, theirs: socket.socket, modules: Sequence[str]) -> Child:
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        return subprocess.Popen(
            [*command, str(theirs.fileno()), *modules, ROOM],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def _fork(self, theirs: socket.socket) -> Child:
        for stream in (sys.stdout, sys.stderr):  # else each child writes what is left there once more
            if stream is not None:
                stream.flush()
        if (pid := os.fork()) == 0:
            self._socket.detach()
            _end_after(lambda: _be_template(theirs, self._environment))
        return WarmChild(pid, [sys.executable, "template"])

    def start(
        self, words: list[str], environment: dict[str, str], log: int, fds: list[int], new_session: bool
    ) -> WarmChild | None:
        """Forks a child from the process that has imported what it needs; None where `exec` must start it."""
        module = _module_of(words)
        if module is None or _of_imports(environment) != _of_imports(self._environment):
            return None
        with self._lock:
            try:
                pid = self._ask(
                    [log, log, *fds],
                    module=module,
                    arguments=words[4:],
                    shown=words,
                    environment=environment,
                    cwd=os.getcwd(),
                    new_session=new_session,
                    # As `exec` has it: a shell starts what is put behind `&` so.
                    deaf_to_interrupts=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                    numbers=[1, 2, *fds],
                )
            except (OSError, ValueError):
                self.close()  # what it would still start must not be there twice
                return None
        return WarmChild(pid, words) if pid else None

    def _ask(self, fds: list[int], **job: Any) -> int:
        """The pid of the new child; 0: there is none."""
        request = json.dumps(job).encode()
        if len(request) > LONGEST or len(fds) > _MAX_FILES:
            return 0
        told = f"a new process (pid {self._process.pid} forks it)"
        with adopting_orphans(), waits.waiting(told, deadline_s=_PATIENCE_S, target="the template"):
            socket.send_fds(self._socket, [request], fds)
            return int(self._socket.recv(64) or b"0")

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


_template: Template | None = None


def _fork_here(modules: Sequence[str]) -> Template:
    """A template forked from this process, which imports `modules` for both."""
    with loading_as_children():
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    template = Template(modules, forked=_num_threads() == 1)
    if torch := sys.modules.get("torch"):  # this process computes with as many threads as if it were alone
        given = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(given) if given.isdigit() else num_cores())
    return template


@contextlib.contextmanager
def loading_as_children() -> Iterator[None]:
    """What is imported here can be forked: it waits without spinning, and numpy starts no threads."""
    settings, before = thread_environment(1), dict(os.environ)
    os.environ.update({name: settings[name] for name in _READ_WHEN_LOADED})
    try:
        yield
    finally:
        for name in _READ_WHEN_LOADED:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _module_of(words: list[str]) -> str | None:
    """The module whose `main` is the program; None: it is another kind of command."""
    match words:
        case [sys.executable, "-P", "-m", package, *_] if _is_own_package(package):
            return f"{package}.__main__"
        case [sys.executable, "-P", "-c", code, *_] if found := _MAIN.fullmatch(code):
            return found[1]
    return None


def _is_own_package(name: str) -> bool:
    """Whether its `__main__` has a function `main`; programs of others, and single modules, are executed."""
    try:
        return name.startswith("slime.") and importlib.util.find_spec(f"{name}.__main__") is not None
    except ModuleNotFoundError:
        return False


def _of_imports(environment: dict[str, str]) -> dict[str, str]:
    """What imports read, without what torch sets while it is imported, in the template as in its owner."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name != "TORCHINDUCTOR_CACHE_DIR"
    }


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ---- the template ------------------------------------------------------------------------------------------


def main() -> None:
    """`... FD MODULE... ROOM`: imports the modules, then forks a process for each request of its owner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group: the owner decides
    owner = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:-1]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _work_for(owner)


def _be_template(owner: socket.socket, environment: dict[str, str]) -> None:
    """The same in a process that was forked from its owner: first without anything of that one's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.root.handlers.clear()
    nowhere = os.open(os.devnull, os.O_RDWR)
    take_files({0: nowhere, 1: nowhere, 2: nowhere, owner.fileno(): owner.fileno()})
    with contextlib.suppress(
        AttributeError
    ):  # another library than glibc, which reads them at a program's start
        for name, option in _MALLOC_OPTIONS.items():
            ctypes.CDLL(None).mallopt(option, int(environment[name]))
    with contextlib.suppress(OSError):
        _make_room()
    _work_for(owner)


def _work_for(owner: socket.socket) -> None:
    """Each process that is forked runs its program; the template never returns."""
    job, fds = serve(owner)
    owner.detach()  # its number may soon be another file's: nobody may close that one
    _become(job, fds)
    importlib.import_module(job["module"]).main()


def _end_after(program: Callable[[], None]) -> NoReturn:
    """Run it and end as the interpreter does, without going back to what this was forked from."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code & 0xFF)


def serve(owner: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in each new process, with its job; the template itself never returns."""
    while True:
        request, fds, _, _ = socket.recv_fds(owner, LONGEST, _MAX_FILES)
        if not request:
            os._exit(0)  # the owner is gone
        if _num_threads() > 1:  # a lock that another thread holds would never be free
            pid = b"0"
        else:
            told, tell = os.pipe()
            adopted, let_go = os.pipe()
            if (between := os.fork()) == 0:
                if (child := os.fork()) == 0:
                    os.close(let_go)
                    if not os.read(adopted, 1):  # until the one between has ended, and the owner adopts this
                        os._exit(1)  # the template was ended
                    return json.loads(request), fds
                os.write(tell, str(child).encode())
                os._exit(0)
            os.waitpid(between, 0)
            os.write(let_go, b"1")
            pid = os.read(told, 64)
            for fd in (told, tell, adopted, let_go):
                os.close(fd)
        for fd in fds:
            os.close(fd)
        owner.send(pid)


def _become(job: dict[str, Any], fds: list[int]) -> None:
    """Files, folder, environment and signals of a process that `exec` had started."""
    take_files({0: os.open(os.devnull, os.O_RDONLY), **dict(zip(job["numbers"], fds, strict=True))})
    if not job["deaf_to_interrupts"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    show_command(job["shown"])
    sys.argv = [job["module"], *job["arguments"]]
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))


def show_command(words: list[str]) -> None:
    """What `ps` says: written over the arguments that the template was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: max(0, end - start - 1)]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _make_room() -> None:
    """Memory of its own for the command lines that children show, where `exec` left too little of it."""
    room = mmap.mmap(-1, len(ROOM), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _rooms.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2]
    fields = [0, 0, 0, 0, *map(int, stat.split()[1:])]  # as proc(5) numbers them
    before, environment = (*fields[26:28], *fields[45:48]), fields[50:52]
    behind = (fields[28], start, start + len(ROOM), *environment, 0)
    layout = ctypes.create_string_buffer(struct.pack("<12QIi", *before, 0, *behind, 0, -1))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    # The end of the heap last, so that nothing is allocated before it is told to the kernel.
    struct.pack_into("<Q", layout, 8 * 5, libc.sbrk(0))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout) - 1), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


_rooms: list[mmap.mmap] = []  # lives as long as the process


def take_files(wanted: dict[int, int]) -> None:
    """Each file at its number, and no other open."""
    import fcntl

    high = max(64, *wanted, *wanted.values()) + 1
    parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for number, fd in wanted.items()}
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in parked.values():
            with contextlib.suppress(OSError):
                os.close(fd)
    for number, fd in parked.items():
        os.dup2(fd, number)
        os.close(fd)
