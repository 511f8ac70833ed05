"""A process that ends while requests are under way says nothing about them."""

import subprocess
import sys

# Requests that are tried again and again, because nobody listens, and one that waits for an answer.
SCRIPT = """
import asyncio, atexit, socket, threading, time

atexit.register(time.sleep, 3)  # registered first, so called last: an end that takes its time
from slime.utils import http_utils
from slime.utils.async_utils import get_loop

silent = socket.create_server(("127.0.0.1", 0))
closed = socket.create_server(("127.0.0.1", 0))
refused = closed.getsockname()[1]
closed.close()
begun = threading.Event()

async def ask(port):
    http_utils.get_session()
    begun.set()
    await http_utils.post(f"http://127.0.0.1:{port}/", {}, max_retries=10_000)

for port in (refused, refused, silent.getsockname()[1]):
    asyncio.run_coroutine_threadsafe(ask(port), get_loop())
begun.wait()
silent.accept()
raise SystemExit(130)
"""


def test_an_interrupted_process_leaves_no_word_of_open_sessions():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
