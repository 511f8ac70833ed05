"""Several hosts on this machine: network namespaces with an address, a name, a /tmp and a /dev/shm each."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, eventually

from slime.utils.machine.ports import with_port

ROOT = Path(__file__).parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
_RAY_PORT = 6379
_RAY_STARTS = 4  # Ray gives a node 30 s, which a busy machine may need
_BOOT = """
hostname {name}; mount --make-rprivate /; mount -t proc proc /proc
{keep}
mount -t tmpfs -o size=2g tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm
{share}
{names}
echo booted; exec sleep infinity
"""


@dataclass(slots=True)
class Host:
    """A host that is up. `init`: its first process; `network`: its namespace; `script`: what it boots.

    `switch`, `port`: the namespace of the switch, and the end of its cable there.
    """

    name: str
    address: str
    network: str
    switch: str
    port: str
    script: str
    init: subprocess.Popen = field(init=False)

    @property
    def pid(self) -> int:
        """Its first process, as this machine numbers it."""
        [first] = eventually(lambda: psutil.Process(self.init.pid).children())
        return first.pid

    def boot(self) -> None:
        """Start it, also again after `kill`: its /tmp and /dev/shm are empty."""
        line = [*_within(self.network), "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        line += ["--kill-child", "sh", "-c", self.script]
        self.init = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.init.stdout is not None and self.init.stdout.readline() == "booted\n", "it did not boot"

    def kill(self) -> None:
        """End all its processes at once, as a power failure does."""
        self.init.kill()
        self.init.wait()

    def cut(self) -> None:
        """Take its network down: whatever is sent to it or by it is lost."""
        _inside(self.network, "ip link set eth0 down")

    def heal(self) -> None:
        _inside(self.network, "ip link set eth0 up", "ip route replace default dev eth0")

    @property
    def processes(self) -> list[psutil.Process]:
        """All that runs on it, as this machine numbers them."""
        return psutil.Process(self.init.pid).children(recursive=True)

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
def network_hosts(
    number: int, shared: Path | None = None, *, version: int = 4, misnamed: bool = False
) -> Iterator[list[Host]]:
    """Yield hosts that reach each other. `shared`: one folder that all of them see, under the same path.

    `version`: of their addresses; with 6 they have none of version 4 but loopback. `misnamed`: /etc/hosts has
    each under 127.0.1.1, as Debian's has, and a network of its own comes before the common one.
    """
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    mark = f"st{os.getpid() % 100000}"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{mark}s"))
        _inside(switch, "ip link add br0 type bridge", "ip link set br0 up")
        hosts = []
        for i in range(number):
            address = f"fd79::1{i}" if version == 6 else f"10.79.0.1{i}"
            hosts.append(stack.enter_context(_host(mark, switch, i, shared, address, misnamed)))
        yield hosts


@contextlib.contextmanager
def _host(
    mark: str, switch: str, number: int, shared: Path | None, address: str, misnamed: bool
) -> Iterator[Host]:
    port, keep, share, names = f"{mark}p{number}", "", "", ""
    if misnamed:
        lines = f"127.0.0.1 localhost\\n::1 localhost\\n127.0.1.1 host{number}\\n"
        names = f"printf '{lines}' > /tmp/names; mount --bind /tmp/names /etc/hosts"
    if shared is not None:
        keep = f"mount -t tmpfs tmpfs /mnt; mkdir /mnt/shared; mount --bind '{shared}' /mnt/shared"
        share = f"mkdir -p '{shared}'; mount --bind /mnt/shared '{shared}'"
    script = _BOOT.format(name=f"host{number}", keep=keep, share=share, names=names)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(_namespace(f"{mark}h{number}"))
        _run(f"ip link add {port} netns {switch} type veth peer name eth0 netns {net}")
        _inside(switch, f"ip link set {port} master br0 up")
        if misnamed:  # under the same address on each
            _inside(net, "ip link add adm0 type veth peer name adm1", "ip addr add 10.80.0.1/24 dev adm0")
            _inside(net, "ip link set adm0 up", "ip link set adm1 up")
        size = "64 nodad" if ":" in address else "24"
        _inside(net, f"ip addr add {address}/{size} dev eth0", "ip link set eth0 up", "ip link set lo up")
        _inside(net, f"ip {'-6 ' * (':' in address)}route add default dev eth0")
        host = Host(f"host{number}", address, net, switch, port, script)
        host.boot()
        stack.callback(host.kill)
        yield host


@contextlib.contextmanager
def slow_cable(host: Host, others: list[Host], delay_s: float, loss: float) -> Iterator[None]:
    """Delay what a host sends and receives within the block, and lose a share of it."""
    program = [sys.executable, str(Path(__file__).with_name("slow_cable.py"))]
    for one in (host, *others):
        subprocess.run([*_within(one.network), *program, "plain", "eth0"], check=True)
    _inside(
        host.switch,
        f"ip link set {host.port} nomaster",
        "ip link add slow0 type veth peer name slow1",
        "ip link set slow1 master br0 up",
        "ip link set slow0 up",
    )
    line = [*_within(host.switch), *program, host.port, "slow0", str(delay_s), str(loss)]
    cable = subprocess.Popen(line)
    try:
        yield
        assert cable.poll() is None, "the cable broke"
    finally:
        cable.kill()
        cable.wait()
        _inside(host.switch, f"ip link set {host.port} master br0", "ip link del slow0")


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run(f"ip netns add {name}")
    try:
        yield name
    finally:
        _run(f"ip netns del {name}")


def _within(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _inside(name: str, *lines: str) -> None:
    for line in lines:
        _run(" ".join([*_within(name), line]))


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def ray_on(hosts: list[Host], **env: str) -> Iterator[str]:
    """Yield the address of a Ray cluster of these hosts; it ends with them.

    `env`: what all processes of a host but the first have in their environment.
    """
    for host in hosts:
        join_ray(host, hosts[0], **(env if host is not hosts[0] else {}))
    yield with_port(hosts[0].address, _RAY_PORT)


def join_ray(host: Host, head: Host, **env: str) -> None:
    """Start Ray on a host; the head is the first."""
    start = (*RAY, "start", "--num-cpus", "1", "--disable-usage-stats")
    own = ("--head", "--port", str(_RAY_PORT), "--include-dashboard", "false")
    joins = own if host is head else ("--address", with_port(head.address, _RAY_PORT))
    for _ in range(_RAY_STARTS):
        started = host.run(*start, *joins, "--node-ip-address", host.address, **environment(), **env)
        if started.returncode == 0:
            return
        host.run(*RAY, "stop", "--force", **environment())  # what a failed start left would refuse the next
    raise AssertionError(started.stdout)


def environment() -> dict[str, str]:
    """What processes on hosts get from the tests: this checkout, and one thread each."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
