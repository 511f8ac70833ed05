"""Several hosts on this machine: network namespaces with an address, a name, a /tmp and a /dev/shm each."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
_RAY_STARTS = 4  # Ray gives a node 30 s, which a busy machine may need
_BOOT = """
hostname {name}; mount --make-rprivate /; mount -t proc proc /proc
{keep}
mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm
{share}
echo booted; exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that is up. `pid`: its first process, as this machine numbers it."""

    name: str
    address: str
    pid: int

    def command(self, *words: str) -> list[str]:
        """The words of a command line that runs on this host."""
        inside = ("-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--wd=/")
        return ["nsenter", *inside, *words]

    def run(self, *words: str, cwd: str = "/", **env: str) -> subprocess.CompletedProcess:
        """Run a command on this host to its end; its output is in `stdout`."""
        line = self.command("env", "-C", cwd, *(f"{name}={value}" for name, value in env.items()), *words)
        kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(line, text=True, timeout=2 * PATIENCE_S, stdin=subprocess.DEVNULL, **kinds)


def why_no_hosts() -> str | None:
    """Why this machine cannot make hosts; None: it can."""
    if os.geteuid() != 0:
        return "hosts are made of network namespaces, which need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"hosts need iproute2 and util-linux: {', '.join(missing)} is missing"
    if ROOT.is_relative_to("/tmp"):
        return f"each host has a /tmp of its own, and would not see the code in {ROOT}"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], capture_output=True
    )
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


@contextlib.contextmanager
def network_hosts(number: int, shared: Path | None = None) -> Iterator[list[Host]]:
    """Yield hosts that reach each other. `shared`: one folder that all of them see, under the same path."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    mark = f"st{os.getpid() % 100000}"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{mark}s"))
        _inside(switch, "ip link add br0 type bridge", "ip link set br0 up")
        yield [stack.enter_context(_host(mark, switch, i, shared)) for i in range(number)]


@contextlib.contextmanager
def _host(mark: str, switch: str, number: int, shared: Path | None) -> Iterator[Host]:
    address, port = f"10.79.0.1{number}", f"{mark}p{number}"
    keep = share = ""
    if shared is not None:
        keep = f"mount -t tmpfs tmpfs /mnt; mkdir /mnt/shared; mount --bind '{shared}' /mnt/shared"
        share = f"mkdir -p '{shared}'; mount --bind /mnt/shared '{shared}'"
    script = _BOOT.format(name=f"host{number}", keep=keep, share=share)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(_namespace(f"{mark}h{number}"))
        _run(f"ip link add {port} netns {switch} type veth peer name eth0 netns {net}")
        _inside(switch, f"ip link set {port} master br0 up")
        _inside(net, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up", "ip link set lo up")
        _inside(net, "ip route add default dev eth0")
        line = ["ip", "netns", "exec", net, "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        init = subprocess.Popen(
            [*line, "--kill-child", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        stack.callback(init.wait)
        stack.callback(init.kill)
        assert init.stdout is not None and init.stdout.readline() == "booted\n", "the host did not boot"
        [first] = eventually(lambda: psutil.Process(init.pid).children())
        yield Host(f"host{number}", address, first.pid)


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run(f"ip netns add {name}")
    try:
        yield name
    finally:
        _run(f"ip netns del {name}")


def _inside(name: str, *lines: str) -> None:
    for line in lines:
        _run(f"ip netns exec {name} {line}")


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def ray_on(hosts: list[Host]) -> Iterator[str]:
    """Yield the address of a Ray cluster of these hosts; it ends with them."""
    head = hosts[0]
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "1", "--disable-usage-stats")
    at = f"{head.address}:6379"
    own = ("--head", "--port", "6379", "--include-dashboard", "false")
    for host in hosts:
        joins = own if host is head else ("--address", at)
        for _ in range(_RAY_STARTS):
            started = host.run(*ray, *joins, "--node-ip-address", host.address, **environment())
            if started.returncode == 0:
                break
        assert started.returncode == 0, started.stdout
    yield at


def environment() -> dict[str, str]:
    """What processes on hosts get from the tests: this checkout, and one thread each."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
