"""Programs that try to leave their box, to take the machine, or to stay: each fails, and the box goes on."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from isolation_kinds import usable
from patience import LONG_S, eventually

from slime.agent.sandbox import Limits, LocalSandbox
from slime.agent.sandbox.isolation import BUBBLEWRAP, NAMESPACES

MIB = 1 << 20


pytestmark = pytest.mark.parametrize("kind", [usable(BUBBLEWRAP), usable(NAMESPACES)])


def in_box(kind, work, **limits):
    async def inner():
        async with LocalSandbox(isolation=kind, limits=Limits(**limits)) as box:
            result = await work(box)
            assert (await box.exec("echo alive", timeout=LONG_S))[1] == "alive\n"
            return result

    return asyncio.run(inner())


def python(code):
    return f"python3 - <<'END'\n{code}\nEND"


def test_a_fork_bomb_ends_with_its_time(kind):
    async def work(box):
        code, _, _ = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout=1)
        assert code in (124, 137, 254)
        forks = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        assert (await box.exec(python(forks), timeout=1))[0] in (124, 137)
        running = await box.exec("ls -d /proc/[0-9]* | wc -l", timeout=LONG_S)
        assert int(running[1]) < 40

    in_box(kind, work, num_processes=32)


def test_a_memory_bomb_of_one_process_gets_no_memory(kind):
    async def work(box):
        code, _, err = await box.exec(python("x = bytearray(1 << 30)"), timeout=LONG_S)
        assert code != 0
        assert "MemoryError" in err or "memory" in err

    in_box(kind, work, memory_bytes=128 * MIB)


def test_a_memory_bomb_of_many_processes_is_ended(kind):
    """Each process is small enough; together they are too large."""
    many = (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        x = bytearray(os.urandom(1 << 20)) * 40\n        time.sleep(1000)\ntime.sleep(1000)"
    )

    async def work(box):
        code, _, err = await box.exec(python(many), timeout=LONG_S)
        assert code == 137
        assert "more than its 128 MiB of memory" in err

    in_box(kind, work, memory_bytes=128 * MIB)


def test_memory_that_belongs_to_no_process_cannot_be_had(kind):
    async def work(box):
        code, _, err = await box.exec(python("import os; os.memfd_create('hidden')"))
        assert code == 1
        assert "not implemented" in err

    in_box(kind, work)


PAGE_TABLES = """
import mmap
held, flags = [], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
while True:
    held.append(mmap.mmap(-1, 1 << 31, flags=flags, prot=mmap.PROT_READ))
    for page in range(0, 1 << 31, 1 << 21): held[-1][page]
"""
SOCKETS = """
import os, socket, time
for _ in range(16):
    if os.fork() == 0:
        held = []
        try:
            while True:
                held += socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                for one in held[-2:]:
                    one.setblocking(False)
                    try:
                        while True: one.send(bytes(60000))
                    except BlockingIOError: pass
        except OSError: time.sleep(1000)
time.sleep(1000)
"""


@pytest.mark.parametrize("hog", [PAGE_TABLES, SOCKETS], ids=["tables", "sockets"])
def test_memory_of_the_kernel_counts_as_memory_of_the_sandbox(kind, hog):
    """Neither page tables nor the buffers of sockets are resident memory of a process."""

    async def work(box):
        code, _, err = await box.exec(python(hog), timeout=LONG_S)
        assert code == 137, err
        assert "more than its 64 MiB of memory" in err

    in_box(kind, work, memory_bytes=64 * MIB)


def test_too_many_sockets_and_mappings_are_ended(kind):
    sockets = (
        "import socket, time\nheld = [socket.socketpair() for _ in range(60)]\nprint(len(held), flush=True)\n"
        "time.sleep(1000)"
    )
    mappings = (
        "import mmap, time\nheld = [mmap.mmap(-1, 4096, prot=1 + i % 2) for i in range(5000)]\n"
        "time.sleep(1000)"
    )

    async def work(box):
        code, _, err = await box.exec(python(sockets), timeout=LONG_S)
        assert (code, "more than 100 sockets" in err) == (137, True), err
        code, _, err = await box.exec(python(mappings), timeout=LONG_S)
        assert (code, "more than 4000 mappings of memory" in err) == (137, True), err

    in_box(kind, work, num_sockets=100, num_maps=4000)


def test_processes_that_hide_their_mappings_while_they_start_are_not_ended(kind):
    """A process without PR_SET_DUMPABLE, such as the grader of --rm-type code, forks one that is like it."""
    hidden = (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(4, 0)\nchild = os.fork()\ntime.sleep(2)\n"
        "os._exit(0) if child == 0 else os.waitpid(child, 0)\nprint('calm')"
    )

    async def work(box):
        assert await box.exec(python(hidden), timeout=LONG_S) == (0, "calm\n", "")

    in_box(kind, work)


def test_only_sockets_whose_memory_is_counted_can_be_made(kind):
    tries = (
        "import socket\nfor family, kind in ((1, 2), (2, 2), (10, 2), (16, 3)): socket.socket(family, kind)"
    )

    async def work(box):
        assert (await box.exec(python(tries)))[0] == 0
        for family in (17, 38, 40):  # packets, the kernel's ciphers, the host of a virtual machine
            code, _, err = await box.exec(python(f"import socket; socket.socket({family}, 2)"))
            assert (code, "not implemented" in err) == (1, True), err

    in_box(kind, work)


def test_no_user_namespace_can_be_made_inside(kind):
    nested = (
        "import ctypes, os; libc = ctypes.CDLL(None); os._exit(42 if libc.unshare(0x10000000) == 0 else 0)"
    )

    async def work(box):
        assert (await box.exec(python(nested)))[0] == 0
        assert (await box.exec("unshare -U true"))[0] != 0

    in_box(kind, work)


def test_a_full_disk_is_full_for_the_box_only(kind):
    async def work(box):
        code, _, err = await box.exec(
            "for i in 1 2 3 4 5 6; do head -c 4000000 /dev/zero > $i; done", timeout=LONG_S
        )
        assert code != 0
        assert "No space left" in err
        assert (await box.exec("head -c 9000000 /dev/zero > one; ls -s one; rm -f [1-6] one"))[0] == 0
        big = await box.exec("head -c 50000000 /dev/zero > big")
        assert big[0] != 0
        await box.exec("rm -f big", check=True)
        for folder in ("/usr", "/usr/bin", "/proc"):
            assert (await box.exec(f"touch {folder}/x"))[0] != 0

    in_box(kind, work, disk_bytes=16 * MIB, file_bytes=8 * MIB)


def test_many_small_files_are_too_many(kind):
    endless = "n = 0\nwhile True:\n    n += 1\n    open(f'/work/{n}', 'w').close()"

    async def work(box):
        code, _, err = await box.exec(python(endless), timeout=LONG_S)
        assert code != 0
        assert "more than 2000 files" in err or "No space left" in err
        await box.exec("find /work -type f -delete", check=True, timeout=LONG_S)

    in_box(kind, work, num_files=2000)


def test_killing_everything_kills_only_the_box(kind):
    async def work(box):
        code, _, _ = await box.exec("kill -9 -1; kill -9 1; kill -STOP 1; echo still here")
        assert code in (0, 137)

    in_box(kind, work)


def test_files_of_the_run_and_of_other_boxes_are_not_there(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the run")
    secret.chmod(0o644)
    here = Path(__file__).resolve()

    async def work(box):
        async with LocalSandbox(isolation=kind) as other:
            await other.write_file("/tmp/theirs", "of another box")
            for path in (secret, here, "/tmp/theirs", "/etc/shadow", f"/proc/{os.getpid()}/environ"):
                assert (await box.exec(f"cat {path}"))[0] != 0, path
            code, out, _ = await box.exec("cat /proc/1/environ /proc/1/mem; cat /proc/1/fd/*", timeout=5)
            assert (code != 0, out) == (True, "")
            assert (await box.exec("ls /root /home/agent /tmp"))[1].split() == [
                "/home/agent:",
                "/root:",
                "/tmp:",
            ]
            assert (await box.exec("env"))[1].count("=") < 12

    in_box(kind, work)


def test_there_is_no_network(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"

        async def work(box):
            code, _, err = await box.exec(python(connect))
            assert code == 1
            assert "Error" in err
            assert (await box.exec("cat /proc/net/dev"))[1].count(":") <= 1  # loopback, which reaches nobody
            unix = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0slime-box-64000')"
            assert (await box.exec(python(unix)))[0] == 1

        in_box(kind, work)


def test_no_rights_can_be_gained(kind):
    async def work(box):
        for command in ("unshare -Ur true", "mount -t tmpfs x /mnt", "chroot / true", "su -c true"):
            assert (await box.exec(command))[0] != 0, command
        rights = (await box.exec("grep -E 'CapEff|NoNewPrivs' /proc/self/status"))[1].split()
        assert rights == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]

    in_box(kind, work)


def test_endless_output_is_cut_and_ended(kind):
    async def work(box):
        code, out, err = await box.exec("yes", timeout=LONG_S)
        assert (code, len(out)) == (137, 65536)
        assert "printed without end" in err
        code, out, err = await box.exec("head -c 100000 /dev/zero")
        assert (code, len(out)) == (0, 65536)
        assert "only the first 65536 bytes" in err

    in_box(kind, work, output_bytes=65536)


def alive_with(mark):
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]


def test_a_daemon_stays_for_the_next_command_and_goes_with_its_box(kind):
    mark = f"daemon-{os.getpid()}-{kind}"

    async def inner():
        async with LocalSandbox(isolation=kind) as box:
            await box.exec(
                f"setsid bash -c 'exec -a {mark} sleep 1000' </dev/null >/dev/null 2>&1 &", check=True
            )
            while not alive_with(mark):
                await asyncio.sleep(0.01)
            assert (await box.exec(f"grep -alr {mark} /proc/[0-9]*/cmdline | wc -l"))[1] != "0\n"

    asyncio.run(inner())
    eventually(lambda: not alive_with(mark))


DRIVER = """
import asyncio, sys
from slime.agent.sandbox import LocalSandbox

async def main():
    box = await LocalSandbox(isolation=sys.argv[1]).start()
    stays = f"setsid bash -c 'exec -a {sys.argv[2]} sleep 1000' </dev/null >/dev/null 2>&1 &"
    await box.exec(stays, check=True)
    print("ready", flush=True)
    await box.exec("sleep 1000", timeout=1000)

asyncio.run(main())
"""


def test_nothing_outlives_a_driver_that_is_killed(kind):
    mark = f"orphan-{os.getpid()}-{kind}"
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, mark], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    eventually(lambda: alive_with(f"{mark} 1000"), LONG_S)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    eventually(lambda: not alive_with(mark), LONG_S)
