"""A balancer before engines, and requests to it."""

import contextlib
from types import SimpleNamespace

from slime.engines.balancer import SESSION_HEADER, Balancer
from slime.utils import http_utils
from slime.utils.async_utils import run

PAYLOAD = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}


@contextlib.contextmanager
def balanced(urls, **options):
    """(address of a balancer over these engines, the balancer)."""
    balancer = Balancer(urls, **options)
    port = run(balancer.start())
    try:
        yield f"http://127.0.0.1:{port}", balancer
    finally:
        run(balancer.stop())


def post(url, session=None, payload=PAYLOAD):
    headers = {SESSION_HEADER: session} if session else None
    return http_utils.post(f"{url}/generate", payload, max_retries=0, headers=headers)


def member(url: str) -> SimpleNamespace:
    return SimpleNamespace(url=url)
