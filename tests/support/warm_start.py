"""Runs of training start in milliseconds: their processes are forked from one that has imported torch.

Half of the processor time of a small run goes to imports, anew in its driver, its trainer and its engines. In
tests, `subprocess.Popen` and the `spawn` of `multiprocessing` ask a *template* for such a process: one that
has imported what they need, has one thread and has computed nothing. The new one is a real child of the one
that asked: the template forks twice, and the orphan goes to the asker, which is a subreaper meanwhile. Its
pid, exit code, session, signals, open files, environment and command line (`/proc/PID/cmdline`) are those
that `exec` would have given it.

A process that was started so has a template of its own, forked before it did anything else, for its children.
What is not listed in `_program`, and whatever has another environment for imports, is started by `exec` as
always; so is everything under `real_processes()`. Two things differ from a new interpreter: the modules that
are there already (tests of light imports look at real ones) and the seed of string hashes, which processes of
one template share.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST, _MAX_FILES = 1 << 17, 64  # bytes and files of a request
ROOM = "x" * 16_384  # the last argument of a template: memory for the command lines that its children show
_PR_SET_CHILD_SUBREAPER = 36
IMPORTS = (
    "hypothesis.strategies",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "slime.api",
    "slime.backends.fsdp.backend",
    "slime.cli.screen",
    "slime.cluster.run_opening",
    "slime.cluster.training.train_actor",
    "slime.engines.embedded.http_server",
    "slime.engines.sglang.rules",
    "slime.loop",
    "slime.loop_async",
    "slime.preflight.packages",
    "slime.preflight.reward",
    "slime.preflight.run_plan",
    "slime.preflight.stored",
    "slime.rollout.sglang_rollout",
    "slime.runtime.local",
    "slime.weight_sync.shared_memory",
)
# One thread of OpenBLAS and no other: a process that is forked must have no threads.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
# Read by packages while they are imported: where one of these differs, a process imports for itself.
_READ_AT_IMPORT = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH_",
    "PYTHON",
    "LD_",
    "LANG",
    "LC_",
    "TZ",
    "NUMBA_",
)
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT")
_READ_LATER += ("TORCHINDUCTOR_CACHE_DIR",)  # set by torch itself, once it compiles something
_IGNORED: set[signal.Signals] = set()  # by whoever started the tests (nohup): new processes ignore them too
_WORKER = "from slime.runtime.worker_main import main; main()"
_SPAWNED = "from multiprocessing.spawn import spawn_main; "
_FORK_SERVER = "from multiprocessing.forkserver import main; "
_SWITCHES = ("-B", "-P")  # of an interpreter; the first follows from the environment
_TESTS = "import sys;exec(eval(sys.stdin.readline()))"  # a worker of `pytest -n`, which imports it all, too
# The first line of a program (`python -c`) of tests that may be started so: one that looks at no imports.
WARM = "# starts warm\n"
_ENGINE = "slime.engines.embedded"
_COMMANDS = ("train", "train-async", "quickstart", "sweep", "serve", "weight-agent", "weight-publisher")
_SCRIPTS = (
    "train.py",
    "train_async.py",
    "victim.py",
    "trapped_rank.py",
    "live_rank.py",
    "stage_rank.py",
    "group_rank.py",
    "minimal_loop.py",
    "run_cells.py",
)


def interruptible() -> None:
    """A `preexec_fn`: SIGINT ends the process, also where a shell started the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _program(words: list[str]) -> tuple[str, str, list[str]] | None:
    """(`-m`, `-c` or script, what to run, its arguments) of a command that a template can start."""
    if not words or words[0] != sys.executable or "ray" in words:  # Ray's own threads do not end in a fork
        return None
    rest = list(itertools.dropwhile(_SWITCHES.__contains__, words[1:]))
    match rest:
        case ["-m", "slime.engines.embedded", *_]:
            return "-m", rest[1], rest[2:]
        case ["-m", "slime", command, *_] if command in _COMMANDS:
            return "-m", rest[1], rest[2:]
        case ["-u", "-c", code] if code == _TESTS:
            return "-c", code, []
        case ["-c", code, *_] if code == _WORKER or code.startswith((_SPAWNED, _FORK_SERVER, WARM)):
            return "-c", rest[1], rest[2:]
        case [script, *_] if Path(script).name in _SCRIPTS or Path(script).parent.name == "benchmarks":
            return "script", script, rest[1:]
    return None


# ---- the side that asks ------------------------------------------------------------------------------------


class Template:
    """The template of this process. It ends when this process does: it reads from a socket."""

    def __init__(self, ours: socket.socket, environment: dict[str, str]):
        self._socket, self._environment = ours, environment
        self._lock = threading.Lock()
        self.owner = os.getpid()  # what the owner forks has no template

    @classmethod
    def launch(cls) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **dict.fromkeys(_THREADS, "1"), **_WAITING}
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, named)]
        )
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), ROOM]
        with theirs:
            subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return cls(ours, environment)

    def can_start(self, environment: dict[str, str]) -> bool:
        def of_imports(values: dict[str, str]) -> dict[str, str]:
            return {
                name: value
                for name, value in values.items()
                if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
            }

        return of_imports(environment) == of_imports(self._environment)

    def start(self, job: dict[str, Any], fds: list[int]) -> int:
        """The pid of a new child of this process."""
        request = json.dumps(job).encode()
        assert len(request) <= LONGEST, "a command line too long for the template"
        try:
            with self._lock, adopting_orphans():
                socket.send_fds(self._socket, [request], fds)
                answer = self._socket.recv(100)
            assert int(answer or 0), "the template is gone or has threads; its output is that of the tests"
        except BaseException:  # a test that ran out of time, too: the next one must not get its answer
            self.close()
            raise
        return int(answer)

    def is_usable(self) -> bool:
        return self.owner == os.getpid() and self._socket.fileno() != -1

    def close(self) -> None:
        self._socket.close()


_template: Template | None = None
_exec_child = subprocess.Popen._execute_child
_exec_spawned = multiprocessing.util.spawnv_passfds
_real = threading.local()


@contextlib.contextmanager
def real_processes() -> Iterator[None]:
    """Everything that this thread starts meanwhile is a new interpreter."""
    before, _real.wanted = getattr(_real, "wanted", False), True
    try:
        yield
    finally:
        _real.wanted = before


def install() -> None:
    """From now on this process starts runs of training, engines and workers from a template.

    Not where there is a GPU: importing may start threads of its libraries, which do not survive a fork.
    """
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        subprocess.Popen._execute_child = _execute_child
        multiprocessing.util.spawnv_passfds = _spawn


def close() -> None:
    """Ends the template; the next process needs a new one."""
    global _template
    if _template is not None:
        _template.close()
        _template = None


def _execute_child(self: subprocess.Popen, *positional: Any) -> None:
    """As `Popen._execute_child`: sets `pid`, and closes the ends of pipes that are the child's."""
    asked = inspect.signature(_exec_child).bind(self, *positional).arguments
    fds = {number: end if end != -1 else number for number, end in enumerate(_ends(asked))}
    fds.update((fd, fd) for fd in asked["pass_fds"])
    job = _job_of(asked)
    pid = _start_warm(job, fds) if job is not None else None
    if pid is None:
        return _exec_child(self, *positional)
    self.pid = pid
    self._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(asked[name] for name in pipes))
    return None


def _spawn(path: str, words: list[str], fds: list[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`: the pid of a process that runs a function of this one."""
    texts = [os.fsdecode(word) for word in words]
    job = _job(texts) if os.fsdecode(path) == texts[0] else None
    pid = _start_warm(job, {fd: fd for fd in (0, 1, 2, *fds)}) if job is not None else None
    return _exec_spawned(path, words, fds) if pid is None else pid


def _start_warm(job: dict[str, Any], fds: dict[int, int]) -> int | None:
    """The pid of a new child, with files at their numbers; None: `exec` must start it."""
    global _template
    if getattr(_real, "wanted", False):
        return None
    if _template is None or not _template.is_usable():
        with real_processes():
            _template = Template.launch()
    if not _template.can_start(job["environment"]):
        return None
    return _template.start({**job, "numbers": list(fds)}, list(fds.values()))


def _ends(asked: dict[str, Any]) -> tuple[int, int, int]:
    return asked["p2cread"], asked["c2pwrite"], asked["errwrite"]


def _job_of(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What the template needs to know; None: a command, or a way to start it, that it does not know."""
    usual = {"shell": False, "close_fds": True, "gid": None, "gids": None, "uid": None, "umask": -1}
    if any(asked[name] != value for name, value in (*usual.items(), ("process_group", -1))):
        return None
    if not isinstance(asked["args"], (list, tuple)) or asked["preexec_fn"] not in (None, interruptible):
        return None
    words = [os.fspath(word) for word in asked["args"]]
    if asked["executable"] not in (None, *words[:1]):
        return None
    return _job(words, asked["env"], asked["cwd"], asked["start_new_session"])


def _job(
    words: list[str],
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    new_session: bool = False,
) -> dict[str, Any] | None:
    program = _program(words)
    if program is None:
        return None
    kind, what, arguments = program
    return {
        "kind": kind,
        "what": what,
        "arguments": arguments,
        "safe_path": "-P" in itertools.takewhile(_SWITCHES.__contains__, words[1:]),
        "shown": words,
        "environment": dict(os.environ if environment is None else environment),
        "cwd": os.getcwd() if folder is None else os.fspath(folder),
        "new_session": new_session,
    }


# ---- the template ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(owner: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in each new process, with its job; the template itself never returns."""
    while True:
        request, fds, _, _ = socket.recv_fds(owner, LONGEST, _MAX_FILES)
        if not request:
            os._exit(0)  # the owner is gone
        if len(os.listdir("/proc/self/task")) > 1:  # a lock that another thread holds would never be free
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


def show_command(words: list[str]) -> None:
    """What `ps` says: written over the arguments that the template was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: max(0, end - start - 1)]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def take_files(wanted: dict[int, int]) -> None:
    """Each file at its number, and no other open."""
    high = max(64, *wanted, *wanted.values()) + 1
    parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for number, fd in wanted.items()}
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in parked.values():
            with contextlib.suppress(OSError):
                os.close(fd)
    for number, fd in parked.items():
        os.dup2(fd, number)
        os.close(fd)


def _ignore_signals() -> None:
    """They are sent to the whole group: the owner decides."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.signal(number, signal.SIG_IGN) is signal.SIG_IGN:
            _IGNORED.add(number)


def _become(job: dict[str, Any], fds: list[int]) -> None:
    """Files, folder, environment and signals of a process that `exec` had started."""
    take_files(dict(zip(job["numbers"], fds, strict=True)))
    for number in {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT} - _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    show_command(job["shown"])
    _open_streams()
    sys.argv = [job["what"] if job["kind"] == "script" else job["kind"], *job["arguments"]]
    sys.orig_argv = job["shown"]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _set_path(job)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if (threads := os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))) != "1":
        sys.modules["torch"].set_num_threads(int(threads))


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        binary = open(fd, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        lines = not unbuffered and (name == "stderr" or os.isatty(fd))
        stream = io.TextIOWrapper(
            binary, encoding="utf-8", errors=errors, line_buffering=lines, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_path(job: dict[str, Any]) -> None:
    first = []
    if job["kind"] == "script":
        first = [str(Path(job["what"]).resolve().parent)]
    elif not job["safe_path"]:
        first = [os.getcwd() if job["kind"] == "-m" else ""]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *dict.fromkeys([*named, *_INTERPRETERS_PATH])]
    importlib.invalidate_caches()


def _run(job: dict[str, Any]) -> None:
    """The program, as `__main__`."""
    main = types.ModuleType("__main__")
    if job["kind"] == "-c":
        code = compile(job["what"], "<string>", "exec")
    elif job["kind"] == "script":
        main.__file__ = job["what"]
        code = compile(Path(job["what"]).read_bytes(), job["what"], "exec")
    else:
        package = importlib.util.find_spec(job["what"])
        name = f"{job['what']}.__main__" if package.submodule_search_locations else job["what"]
        main.__spec__ = importlib.util.find_spec(name)
        main.__package__ = main.__spec__.parent
        main.__file__ = sys.argv[0] = main.__spec__.origin
        code = main.__spec__.loader.get_code(name)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _fork_template() -> None:
    """In a new process, before it does anything: its own template, for the processes that it starts."""
    global _template
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        sink = os.open(os.devnull, os.O_RDWR)
        take_files({0: sink, 1: sink, 2: sink, theirs.fileno(): theirs.fileno()})
        _template = None
        show_command(["template"])
        raise _Again(theirs)
    theirs.close()
    _template = Template(ours, dict(os.environ))
    install()


class _Again(Exception):
    """Unwinds a fork to the loop of templates."""


if __name__ == "__main__":
    # Under its own name, too: what the programs import of it must be this module.
    sys.modules["warm_start"] = sys.modules["__main__"]
    _INTERPRETERS_PATH = [path for path in sys.path if path not in os.environ["PYTHONPATH"].split(os.pathsep)]
    for _name in IMPORTS:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _owner = socket.socket(fileno=int(sys.argv[1]))
    while True:
        _ignore_signals()
        _todo, _fds = serve(_owner)
        _owner.detach()  # closed with all others, its number is soon another's: nobody may close that one
        _become(_todo, _fds)
        if _todo["what"] in (_ENGINE, _WORKER) or _todo["what"].startswith((_SPAWNED, _FORK_SERVER)):
            break  # they start no others
        try:
            _fork_template()
            break
        except _Again as again:
            _owner = again.args[0]
    _run(_todo)
