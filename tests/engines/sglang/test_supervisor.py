"""The process around an SGLang server, with a stand-in for the server: ports, readiness, a clean end."""

import os
import signal
import socket
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, eventually

from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.sglang import supervisor
from slime.engines.sglang.command import SGLangOptions, server_words, sglang_command
from slime.utils.errors import RunStopped

# Serves /health_generate after a moment, with one worker process; `--taken N`
# never serves where N is below 0.
SERVER = """
import http.server, os, subprocess, sys, time
port, folder, taken = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
starts = os.path.join(folder, "starts")
with open(starts, "a") as file: file.write(str(port) + "\\n")
if taken < 0: time.sleep(600)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.path.join(folder, "pids"), "w") as file: file.write(f"{os.getpid()} {worker.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    """start(taken=0) -> an EngineServer around the stand-in, launched."""
    (tmp_path / "server.py").write_text(SERVER)
    started = []

    def make(taken: int = 0, timeout_s: float = PATIENCE_S, beside: Path | None = None) -> EngineServer:
        def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
            words = [sys.executable, supervisor.__file__, "--host", "127.0.0.1", "--port", str(port)]
            words += [
                "--ready-file",
                str(ready_file),
                "--life-fd",
                str(life_fd),
                "--stopped-limit-s",
                "1",
                *([] if beside is None else ["--beside", str(beside)]),
                "--",
            ]
            return [
                *words,
                sys.executable,
                str(tmp_path / "server.py"),
                supervisor.PORT,
                str(tmp_path),
                str(taken),
            ]

        server = EngineServer(LaunchPlan("engine-0", command, {}, tmp_path / "engine.log", timeout_s))
        started.append(server)
        server.launch()
        return server

    yield make
    for server in started:
        server.stop()


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def is_gone(number: int) -> bool:
    try:
        return psutil.Process(number).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def all_gone(numbers: list[int]) -> bool:
    return eventually(lambda: all(map(is_gone, numbers)))


def test_it_is_ready_when_the_server_answers_a_probe(start, tmp_path):
    url = start().wait_ready()
    with urllib.request.urlopen(f"{url}/health_generate") as answer:
        assert answer.status == 200
    assert f"{url.rpartition(':')[2]}\n" == (tmp_path / "starts").read_text()


def test_what_runs_beside_the_start_gets_the_server_s_words_and_may_end_or_fail(start, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "part = pathlib.Path(sys.argv[3]) / 'said.part'\n"
        "part.write_text(' '.join([str(os.getpid()), *sys.argv[1:]]))\n"
        "part.rename(part.with_suffix(''))\n"
        "sys.exit('no compiler')\n"
    )
    server = start(beside=script)
    url = server.wait_ready()
    assert eventually((tmp_path / "said").exists)
    pid, *words = (tmp_path / "said").read_text().split()
    assert words == [str(tmp_path / "server.py"), url.rpartition(":")[2], str(tmp_path), "0"]
    assert all_gone([int(pid)]) and server.alive()


def test_what_runs_beside_the_start_goes_with_the_server(start, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "part = pathlib.Path(sys.argv[3]) / 'said.part'\n"
        "part.write_text(str(os.getpid()))\n"
        "part.rename(part.with_suffix(''))\n"
        "time.sleep(600)\n"
    )
    server = start(beside=script)
    server.wait_ready()
    assert eventually((tmp_path / "said").exists)
    server.stop()
    assert all_gone([int((tmp_path / "said").read_text()), *pids(tmp_path)])


def test_stopping_ends_server_and_workers(start, tmp_path):
    server = start()
    server.wait_ready()
    server.stop()
    assert all_gone(pids(tmp_path))


def test_all_end_when_the_run_is_gone(start, tmp_path):
    server = start()
    server.wait_ready()
    server._life.close()  # what the kernel does when the driver is killed
    assert all_gone([server.pid, *pids(tmp_path)])


def test_a_killed_supervisor_takes_the_server_along(start, tmp_path):
    server = start()
    server.wait_ready()
    os.kill(server.pid, signal.SIGKILL)
    assert all_gone(pids(tmp_path)[:1])


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_server_or_worker_is_the_death_of_the_engine(start, tmp_path, victim):
    server = start()
    server.wait_ready()
    os.kill(pids(tmp_path)[victim], signal.SIGKILL)
    assert all_gone(pids(tmp_path))
    server._process.wait(PATIENCE_S)
    assert not server.alive()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_server_or_worker_is_ended(start, tmp_path, victim):
    server = start()
    server.wait_ready()
    os.kill(pids(tmp_path)[victim], signal.SIGSTOP)
    assert all_gone(pids(tmp_path))
    server._process.wait(PATIENCE_S)
    assert "is stopped (SIGSTOP); the server is killed" in server.describe_end()


def test_a_restarted_engine_keeps_its_port(start, tmp_path):
    server = start()
    url = server.wait_ready()
    server.kill()
    server.launch()
    assert server.wait_ready() == url


def test_a_held_port_is_given_to_nobody_who_asks_for_any():
    hold = supervisor.PortHold("127.0.0.1", 0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", hold.port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", hold.port))
        server.listen()
    hold.release()


def test_a_server_that_never_answers_is_given_up_with_its_last_words(start):
    server = start(taken=-1, timeout_s=1.0)
    with pytest.raises(RunStopped, match=r"not done after 1.0 s .*last lines of .*engine.log"):
        server.wait_ready()


def test_the_user_s_own_flags_come_last_and_replace_our_limits():
    options = SGLangOptions(
        "python", "/model", True, "float32", 1, 7, False, extra=["--max-total-tokens", "99"]
    )
    words = server_words(options)
    assert words[-2:] == ["--max-total-tokens", "99"] and words.count("--max-total-tokens") == 1
    assert words[words.index("--device") + 1] == "cpu" and "--enable-memory-saver" not in words


def test_a_gpu_server_gets_no_flag_of_the_cpu():
    words = server_words(SGLangOptions("python", "/model", False, "bfloat16", 4, 7, True))
    assert "--device" not in words and "--enable-memory-saver" in words
    assert words[words.index("--tp-size") + 1] == "4"


def test_the_deterministic_mode_is_asked_for_once():
    asked = "--enable-deterministic-inference"
    options = SGLangOptions("python", "/model", False, "bfloat16", 1, 7, False, deterministic=True)
    assert server_words(options).count(asked) == 1
    assert server_words(replace(options, extra=(asked,))).count(asked) == 1
    assert asked not in server_words(replace(options, deterministic=False))


def test_a_server_that_speculates_takes_as_many_requests_as_it_is_sent():
    options = SGLangOptions("python", "/model", False, "bfloat16", 1, 0, False, most_requests=256)
    at_a_time = "--max-running-requests"
    assert at_a_time not in server_words(options)
    drafts = ("--speculative-algorithm", "EAGLE")
    words = server_words(replace(options, extra=drafts))
    assert words[words.index(at_a_time) + 1] == "256"
    for own in ((at_a_time, "8"), (f"{at_a_time}=8",)):
        words = server_words(replace(options, extra=(*drafts, *own)))
        assert [word for word in words if word.startswith(at_a_time)] == [own[0]]


def test_kernels_are_built_beside_the_start_of_a_gpu_server_alone(tmp_path):
    options = SGLangOptions("python", "/model", False, "bfloat16", 1, 7, False)
    words = sglang_command(options)(0, tmp_path, 3)
    assert (
        words[words.index("--beside") + 1].endswith("build_kernels.py")
        and "--beside" in words[: words.index("--")]
    )
    assert "--beside" not in sglang_command(replace(options, cpu=True))(0, tmp_path, 3)
