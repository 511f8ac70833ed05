"""The first process of a local sandbox, which runs its commands.

The text of this file is sent to the sandbox's interpreter, so it uses only the standard library of Python
>= 3.8. As the first process it cannot be killed from inside. When its input closes, because the sandbox is
closed or its owner died, it ends, and with it everything in the sandbox.

A frame, in both directions: two lengths (big-endian, 4 bytes each), a JSON object, bytes. The id of a request
is a nonce: only this process knows it, so no other process can forge a reply that the owner accepts.
    {"op": "exec", "id": "5f..", "argv": [...], "env": {...}, "cwd": "/work", "timeout": 5}, standard input
    {"id": "5f..", "code": 0, "reason": null, "out": 3, "cut": false}, output then errors
    {"op": "kill", "id": "5f.."}
    {"op": "write", "id": "a0..", "path": "/work/a", "timeout": 120}, content
    {"op": "read", "id": "c3..", "path": "/work/a", "most": 1000, "timeout": 120}
    {"op": "pack", "id": "d4..", "most": 1000, "timeout": 120}
    {"op": "unpack", "id": "e5..", "timeout": 120}, the archive

Commands and file operations run in children that hold none of the descriptors of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` takes a seventh of the start of a sandbox
    from typing import Any

    from slime.agent.sandbox.guest_files import file_operation  # sent before this text
    from slime.agent.sandbox.guest_memory import MOST_MAPS, count_maps, process_memory, socket_use

WATCH_S = 0.05  # between two counts of memory and files while something runs
HARD_OUTPUT = 16  # a command that prints this many times what is kept is ended
MAPS_EVERY = 5  # memory counts per count of mappings, which costs more
# System calls that hold memory which belongs to no process, or that no program of a model needs; `socket`.
DENIED = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 425, 321, 298, 323, 248, 249, 250, 278), 41),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 425, 280, 241, 282, 217, 218, 219, 75), 198),
}
FAMILIES = (1, 2, 10, 16)  # of sockets whose memory is counted: unix, IPv4, IPv6, netlink


def prctl(*args: Any) -> Any:
    numbers = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]
    return ctypes.CDLL(None, use_errno=True).prctl(*numbers)


def deny_system_calls() -> None:
    """Make some calls (memfd_create, shmget, vmsplice, ...) and sockets of other families return ENOSYS."""
    arch, calls, make_socket = DENIED.get(os.uname().machine, (0, (), 0))
    if not calls:
        return
    # The index of the last but one rule; jumps count from the next rule.
    allow = len(calls) + len(FAMILIES) + 6
    deny = allow + 1
    rules = [(0x20, 0, 0, 4), (0x15, 0, deny - 2, arch), (0x20, 0, 0, 0), (0x35, deny - 4, 0, 0x40000000)]
    rules += [(0x15, deny - 5 - i, 0, number) for i, number in enumerate(calls)]
    rules += [(0x15, 0, allow - len(rules) - 1, make_socket), (0x20, 0, 0, 16)]
    rules += [(0x15, allow - len(rules) - 1 - i, 0, family) for i, family in enumerate(FAMILIES)]
    rules[-1] = (0x15, 0, 1, FAMILIES[-1])
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.ENOSYS)]
    fixed = [struct.pack("HBBI", *rule) for rule in rules]
    program = ctypes.create_string_buffer(b"".join(fixed))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(fixed), ctypes.addressof(program)))
    prctl(22, 2, ctypes.byref(header), 0, 0)


class Job:
    """A running command or file operation. `kept`: bytes of each stream that are kept."""

    def __init__(self, request: dict[str, Any], pid: int, fds: tuple[int, int, int], data: bytes, kept: int):
        self.number, self.pid, self.kept = request["id"], pid, kept
        self.is_command = request["op"] == "exec"
        self.deadline = time.monotonic() + request["timeout"]
        self.stdin, out, err = fds
        self.streams = {out: bytearray(), err: bytearray()}
        self.order = (out, err)
        self.data = memoryview(data)
        self.seen = 0
        self.reason: str | None = None  # the limit that ended it


class Agent:
    """Reads requests, runs commands and enforces limits, in one thread that waits only in its poll."""

    def __init__(self, settings: dict[str, Any], requests: int, replies: int):
        self.limits, self.own_root = settings["limits"], settings["own_root"]
        self.private = settings["private"]  # whether every process of this user belongs to the sandbox
        self.requests, self.replies = requests, replies
        self.input, self.output = bytearray(), bytearray()
        self.jobs: dict[str, Job] = {}
        self.by_fd: dict[int, Job] = {}
        self.busy, self.next_watch, self.num_watches = False, 0.0, 0
        self.files_before = 0  # when the first running command started
        self.poll = select.poll()
        self.poll.register(requests, select.POLLIN)
        self.wake, wake_in = os.pipe()
        for fd in (requests, replies, self.wake, wake_in):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_in)
        self.poll.register(self.wake, select.POLLIN)

    # -- the loop

    def run(self) -> None:
        while True:
            for fd, _event in self.poll.poll(self.patience()):
                if fd == self.requests:
                    self.receive()
                elif fd == self.replies:
                    self.flush()
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                elif fd in self.by_fd:
                    job = self.by_fd[fd]
                    self.feed(job) if fd == job.stdin else self.collect(job, fd)
            self.reap()
            for job in list(self.jobs.values()):
                if job.reason is None and time.monotonic() >= job.deadline:
                    self.end(job, "time")
            self.watch()

    def patience(self) -> int | None:
        now = time.monotonic()
        times = [job.deadline - now for job in self.jobs.values() if job.reason is None]
        if self.busy:
            times.append(self.next_watch - now)
        return max(0, int(min(times) * 1000) + 1) if times else None

    def receive(self) -> None:
        data = os.read(self.requests, 1 << 20)
        if not data:
            self.end_all()
            os._exit(0)
        self.input += data
        while len(self.input) >= 8:
            head, blob = struct.unpack(">II", self.input[:8])
            if len(self.input) < 8 + head + blob:
                return
            request = json.loads(bytes(self.input[8 : 8 + head]))
            content = bytes(self.input[8 + head : 8 + head + blob])
            del self.input[: 8 + head + blob]
            self.answer(request, content)

    def answer(self, request: dict[str, Any], content: bytes) -> None:
        try:
            if request["op"] != "kill":
                self.start(request, content)
            elif request["id"] in self.jobs:
                self.end(self.jobs[request["id"]], "cancelled")
        except OSError as error:
            number = error.errno or 0
            self.reply({"id": request["id"], "errno": number, "error": os.strerror(number)})

    def reply(self, header: dict[str, Any], blob: bytes = b"") -> None:
        head = json.dumps(header).encode()
        self.output += struct.pack(">II", len(head), len(blob)) + head + blob
        self.flush()

    def flush(self) -> None:
        try:
            while self.output:
                del self.output[: os.write(self.replies, self.output[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.end_all()
            os._exit(0)
        if self.output:
            self.poll.register(self.replies, select.POLLOUT)
        else:
            with contextlib.suppress(KeyError):
                self.poll.unregister(self.replies)

    # -- commands

    def start(self, request: dict[str, Any], content: bytes) -> None:
        if not self.jobs and self.own_root:
            self.files_before = self.files_used()
        pipes = [os.pipe() for _ in range(3)]
        (stdin, feed), (out, out_in), (err, err_in) = pipes
        if request["op"] == "exec":
            os.makedirs(request["cwd"], exist_ok=True)
        pid = os.fork()
        if pid == 0:
            code = 127
            try:
                self.detach(stdin, out_in, err_in)
                if request["op"] == "exec":
                    self.become(request)
                code = file_operation(request)
            except BaseException as error:
                os.write(2, f"cannot start: {error}\n".encode())
            os._exit(code)
        for fd in (stdin, out_in, err_in):
            os.close(fd)
        for fd in (feed, out, err):
            os.set_blocking(fd, False)
        kept = request.get("most", self.limits["output_bytes"])
        job = Job(request, pid, (feed, out, err), content, kept)
        self.jobs[job.number] = job
        for fd in (out, err):
            self.by_fd[fd] = job
            self.poll.register(fd, select.POLLIN)
        self.by_fd[feed] = job
        if content:
            self.poll.register(feed, select.POLLOUT)
        self.feed(job)
        self.busy, self.next_watch = True, min(self.next_watch, time.monotonic() + WATCH_S)

    def detach(self, stdin: int, out: int, err: int) -> None:
        """Give up, in a child, this process's session, signals and every descriptor."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for source, target in ((stdin, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))

    def become(self, request: dict[str, Any]) -> None:
        os.chdir(request["cwd"])
        limits = self.limits
        for what, most in (
            (resource.RLIMIT_NPROC, limits["num_processes"] + 1),
            (resource.RLIMIT_DATA, limits["memory_bytes"]),
            (resource.RLIMIT_CPU, limits["cpu_s"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            hard = resource.getrlimit(what)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["env"])

    def feed(self, job: Job) -> None:
        """Write standard input; close it after the last byte."""
        try:
            while job.data:
                job.data = job.data[os.write(job.stdin, job.data[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:
            pass
        self.drop(job.stdin)
        job.stdin = -1

    def drop(self, fd: int) -> None:
        if self.by_fd.pop(fd, None) is None:
            return
        with contextlib.suppress(KeyError):
            self.poll.unregister(fd)
        os.close(fd)

    def collect(self, job: Job, fd: int) -> None:
        """Read what a stream has; keep the first bytes."""
        kept, most = job.streams[fd], job.kept
        for _ in range(16):
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.drop(fd)
                return
            job.seen += len(data)
            kept += data[: max(0, most - len(kept))]
            if job.seen > HARD_OUTPUT * most and job.reason is None:
                self.end(job, "output")
                return

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = next((one for one in self.jobs.values() if one.pid == pid), None)
            if job is not None:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                self.finish(job, code)

    def finish(self, job: Job, code: int) -> None:
        for fd in job.order:
            if fd in self.by_fd:
                self.collect(job, fd)
        for fd in (*job.order, job.stdin):
            self.drop(fd)
        del self.jobs[job.number]
        out, err = (bytes(job.streams[fd]) for fd in job.order)
        if not job.is_command:
            why = job.reason or err.decode(errors="replace") or "its process was killed"
            self.reply({"id": job.number, "errno": code, "error": why} if code else {"id": job.number}, out)
            return
        header = {"id": job.number, "code": code, "reason": job.reason, "out": len(out)}
        self.reply({**header, "cut": job.seen > len(out) + len(err)}, out + err)

    # -- limits

    def end(self, job: Job, reason: str) -> None:
        """Kill a command and all it started; everything in the sandbox if that keeps growing."""
        job.reason = job.reason or reason
        for _ in range(20):
            members = [pid for pid, _, session in self.processes() if session == job.pid]
            if not members:
                return
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self.end_all()

    def end_all(self, reason: str | None = None) -> None:
        for job in self.jobs.values():
            job.reason = job.reason or reason
        if self.private:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)  # all processes that this user may signal, at once
            return
        for _ in range(50):
            alive = self.processes()
            for pid, _, _ in alive:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not alive:
                return

    def processes(self) -> list[tuple[int, int, int]]:
        """Return (pid, parent, session) of the sandbox's live processes, without this one."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        state, parent, _, session = file.read().rpartition(b") ")[2].split()[:4]
                except OSError:
                    continue
                if state not in (b"Z", b"X"):
                    found[int(name)] = (int(parent), int(session))
        own = os.getpid()
        if own != 1:  # no namespace: only descendants; orphans are adopted
            inside, grew = {own}, True
            while grew:
                more = {pid for pid, (parent, _) in found.items() if parent in inside} - inside
                inside |= more
                grew = bool(more)
            found = {pid: found[pid] for pid in inside if pid in found}
        found.pop(own, None)
        return [(pid, parent, session) for pid, (parent, session) in found.items()]

    def watch(self) -> None:
        now = time.monotonic()
        if not self.busy or now < self.next_watch:
            return
        self.next_watch = now + WATCH_S
        pids = [pid for pid, _, _ in self.processes()]
        self.busy = bool(pids or self.jobs)
        self.num_watches += 1
        helpers = {job.pid for job in self.jobs.values() if not job.is_command}
        self.watch_memory([pid for pid in pids if pid not in helpers])
        # A sandbox that is too full already may be cleaned up: only one that grows further is stopped.
        if self.own_root and self.files_used() > max(self.limits["num_files"], self.files_before):
            self.end_all("files")

    def watch_memory(self, pids: list[int]) -> None:
        """End everything if processes, page tables and sockets together use too much memory."""
        # Without a network namespace the sockets of the whole machine would be counted.
        number, held = socket_use() if self.own_root else (0, 0)
        most = self.limits["memory_bytes"] - held
        for exact in (False, True):  # first a quick upper bound, then the exact and slow count
            if sum(process_memory(pid, exact) for pid in pids) <= most:
                break
        else:
            self.end_all("memory")
        if number > self.limits["num_sockets"]:
            self.end_all("sockets")
        if self.num_watches % MAPS_EVERY == 0:
            own = {job.pid for job in self.jobs.values()}  # hidden until they have become their commands
            maps = [(pid, count_maps(pid)) for pid in pids]
            counted = [count for pid, count in maps if pid not in own or count < MOST_MAPS]
            if sum(counted) > self.limits["num_maps"]:
                self.end_all("maps")

    def files_used(self) -> int:
        return sum(use.f_files - use.f_ffree for use in (os.statvfs("/"), os.statvfs("/dev/shm")))


def furnish() -> None:
    """Create the folders and names that programs expect; the sandbox's own root is empty."""
    os.umask(0o022)
    for folder in ("/etc", "/root", "/home/agent", "/work", "/var/tmp", "/opt/bin", "/run"):
        os.makedirs(folder, exist_ok=True)
    for folder in ("/tmp", "/var/tmp"):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o1777)
    own = os.getuid()
    people = f"root:x:0:0:root:/root:/bin/bash\nagent:x:{own}:{own}::/home/agent:/bin/bash\n"
    for path, text in (
        ("/etc/passwd", people),
        ("/etc/group", f"root:x:0:\nagent:x:{own}:\n"),
        ("/etc/hosts", "127.0.0.1 localhost\n"),
        ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ):
        with open(path, "w") as file:
            file.write(text)
    for name in ("python", "python3"):
        if not os.path.lexists(f"/opt/bin/{name}"):
            os.symlink(sys.executable, f"/opt/bin/{name}")


def main(settings: dict[str, Any]) -> None:
    requests, replies = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    prctl(38, 1, 0, 0, 0)  # no program here gains privileges
    prctl(4, 0, 0, 0, 0)  # not dumpable: no program of the sandbox reads this process or its descriptors
    prctl(36, 1, 0, 0, 0)  # this process adopts and reaps orphans
    if settings["own_root"]:
        furnish()
    deny_system_calls()
    agent = Agent(settings, requests, replies)
    agent.reply({"id": settings["hello"], "python": sys.version.split()[0], "uid": os.getuid()})
    agent.run()
