"""Builds the command line that isolates a local sandbox: bubblewrap, user namespaces, or limits only."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from slime.agent.sandbox.base import MIB, Limits, SandboxUnavailable

logger = logging.getLogger(__name__)

BUBBLEWRAP, NAMESPACES, PLAIN = "bubblewrap", "namespaces", "plain"
_FIRST_UID, _LAST_UID = 64_000, 65_000  # above what systems hand out, below nobody
_BOX_UID = 1000
_PROBE_S = 20
# Read-only in a sandbox; of /etc only what programs need to be found and linked.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs", "/etc/ssl/openssl.cnf")


def read_only_paths(extra: tuple[str, ...] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the system folders that a sandbox sees, and links of its root such as /bin -> usr/bin."""
    paths, links = [], []
    for name in _SYSTEM:
        if os.path.islink(name):
            links.append((name, os.readlink(name)))
        elif os.path.isdir(name):
            paths.append(name)
    paths += [name for name in _ETC if os.path.exists(name)]
    python = Path(sandbox_python())
    if not python.is_relative_to("/usr"):
        paths.append(sys.base_prefix)
    return [*paths, *extra], links


@functools.cache
def sandbox_python() -> str:
    """Return the interpreter inside sandboxes: the system's, which a private user can read, else our own."""
    for candidate in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(candidate, os.X_OK):
            return os.path.realpath(candidate)
    return os.path.realpath(os.path.join(sys.base_prefix, "bin", "python3"))


def isolation_command(
    kind: str, limits: Limits, uid: int | None, hello: str, extra: tuple[str, ...] = ()
) -> tuple[list[str], bytes]:
    """Return the command line of a sandbox's first process, and the program that it reads from its input.

    `uid`: its private user (None: the current user). `hello`: the id of the reply that reports readiness.
    """
    paths, links = read_only_paths(extra)
    settings: dict[str, object] = {"own_root": kind != PLAIN, "private": kind != PLAIN or uid is not None}
    settings |= {"read_only": paths, "links": links, "limits": asdict(limits), "hello": hello}
    become = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    command = ["env", "-i", *(_UNSHARE if kind == NAMESPACES else [])]
    if kind == BUBBLEWRAP:
        command = _bubblewrap(limits, paths, links)
    files, calls = ["guest_files.py", "guest_memory.py", "guest_agent.py"], ["main(settings)"]
    if kind == NAMESPACES:
        files, calls = ["guest_root.py", *files], ["build_root(settings)", *calls]
    lines = [f"exec(compile({_source(name)!r}, {name!r}, 'exec'))" for name in files]
    text = "\n".join([*lines, f"settings = {settings!r}", *calls]).encode()
    argv = [*become, *command, sandbox_python(), "-I", "-S", "-B", "-c", BOOT]
    return argv, b"%d\n%s" % (len(text), text)


_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--ipc", "--uts", "--cgroup"]
_UNSHARE += ["--fork", "--kill-child", "--"]
# The first process reads its program: one line with the length, then the text. It ends where the input does.
BOOT = (
    "import os,sys\nr=lambda k: os.read(0,k) or sys.exit(1)\nn=b''\nwhile not n.endswith(b'\\n'): n+=r(1)\n"
    "s=b''\nwhile len(s)<int(n): s+=r(int(n)-len(s))\nexec(compile(s,'box','exec'))"
)


def _bubblewrap(limits: Limits, paths: list[str], links: list[tuple[str, str]]) -> list[str]:
    command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    command += ["--new-session", "--as-pid-1", "--uid", str(_BOX_UID), "--gid", str(_BOX_UID)]
    command += ["--hostname", "box", "--clearenv", "--size", str(limits.disk_bytes), "--tmpfs", "/"]
    for path in paths:
        command += ["--ro-bind", path, path]
    for link, target in links:
        command += ["--symlink", target, link]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(16 * MIB), "--perms", "1777"]
    return [*command, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--chdir", "/", "--"]


@functools.cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@functools.cache
def best_isolation() -> str:
    """Return the first protected kind that works on this machine; SandboxUnavailable where none does."""
    reasons = []
    for kind, program in ((BUBBLEWRAP, "bwrap"), (NAMESPACES, "unshare")):
        why = why_not(kind) if shutil.which(program) else f"{program} is not installed"
        if why is None:
            return kind
        reasons.append(f"{kind}: {why}")
    raise SandboxUnavailable(
        f"no protected sandbox works on this machine ({'; '.join(reasons)}), so programs of the model are "
        "refused. Install bubblewrap (apt-get install bubblewrap); or allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where these "
        "exist; in a container: --security-opt seccomp=unconfined --security-opt apparmor=unconfined); or "
        "use --sandbox e2b or daytona. --sandbox plain runs programs without protection: they can read your "
        "files and use your network."
    )


def describe_protection(kind: str | None = None) -> str:
    """Return how programs of the model are isolated on this machine, and which limits hold.

    `kind` None: the best one that works here; SandboxUnavailable: nothing works.
    """
    if kind == PLAIN:
        return (
            "programs of the model run without protection (--sandbox plain): they can read files of this "
            "machine and use its network. Limits: resident memory and page tables are counted 20 times a "
            "second; not limited: memory of sockets, disk, number of files, user namespaces."
        )
    return (
        f"programs of the model are isolated by {kind or best_isolation()}. Limits: resident memory, page "
        "tables and sockets are counted 20 times a second (a short burst may pass the limit); all other "
        "limits hold."
    )


@functools.cache
def report_start(kind: str) -> None:
    """Log once for each kind how sandboxes of this process are protected."""
    logger.log(logging.WARNING if kind == PLAIN else logging.INFO, "Sandbox: %s", describe_protection(kind))


@functools.cache
def why_not(kind: str) -> str | None:
    """Return why a sandbox of this kind does not start here; None: it does."""
    # It needs its own user: a sandbox that ends kills all processes of its user, also another probe's.
    user = PrivateUser() if has_private_users() else None
    argv, text = isolation_command(kind, Limits(), user.uid if user else None, "probe")
    try:
        done = subprocess.run(argv, input=text, capture_output=True, timeout=_PROBE_S, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        if user:
            user.release()
    if b'"python"' in done.stdout:
        return None
    return done.stderr.decode(errors="replace").strip()[-300:] or f"exit code {done.returncode}"


@functools.cache
def has_private_users() -> bool:
    """Return whether each sandbox gets its own user: the kernel does not count processes of root."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


class PrivateUser:
    """A user id that no other sandbox of this machine has, locked by the name of a socket until it ends."""

    def __init__(self) -> None:
        for self.uid in range(_FIRST_UID, _LAST_UID):
            self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._lock.bind(f"\0slime-box-{self.uid}")
                return
            except OSError:
                self.release()
        raise SandboxUnavailable(f"{_LAST_UID - _FIRST_UID} sandboxes are open on this machine; close some")

    def release(self) -> None:
        self._lock.close()
