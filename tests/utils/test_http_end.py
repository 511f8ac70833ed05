"""A process that ends while requests are under way says nothing about them."""

import subprocess
import sys

from patience import PATIENCE_S

# Requests that are tried again and again, because nobody listens there.
SCRIPT = """
import asyncio, atexit, socket, threading, time

atexit.register(time.sleep, 2)  # registered first, so called last: an end that takes its time
from slime.observability.logging_utils import configure_logger
from slime.utils import http_utils
from slime.utils.async_utils import get_loop

configure_logger()
with socket.create_server(("127.0.0.1", 0)) as closed:
    port = closed.getsockname()[1]
begun = threading.Event()

async def ask():
    http_utils.get_session()
    begun.set()
    await http_utils.post(f"http://127.0.0.1:{port}/", {}, max_retries=10_000)

asyncio.run_coroutine_threadsafe(ask(), get_loop())
begun.wait()
raise SystemExit(130)
"""


def test_an_interrupted_process_leaves_no_word_of_open_sessions():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
