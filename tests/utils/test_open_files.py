"""How many files a process may have open: the limit is raised, what is beyond it is refused in words."""

import asyncio
import resource
import subprocess
import sys

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from slime.utils.machine import open_files

_ASK = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
from slime.utils.machine.open_files import most_requests, raise_limit
print(most_requests(), raise_limit(), most_requests(), most_requests(files_each=2))
"""


def test_a_process_takes_what_the_system_allows_it():
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "400", "272", "136"]


def test_requests_beyond_the_places_are_told_to_come_again_and_the_others_are_served(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (12, 12))  # six places, six kept back

    async def both():
        goes_on = asyncio.Event()

        async def slow(request):
            await goes_on.wait()
            return web.Response()

        handle = open_files.refusing_too_many(slow)
        ask = [asyncio.ensure_future(handle(make_mocked_request("POST", "/"))) for _ in range(9)]
        await asyncio.sleep(0)
        refused = [task for task in ask if task.done()]
        goes_on.set()
        answers = [answer.status for answer in await asyncio.gather(*ask)]
        later = await handle(make_mocked_request("POST", "/"))
        return refused[0].result(), answers, later.status

    refused, answers, later = asyncio.run(both())
    assert answers == [200] * 6 + [503] * 3 and later == 200
    assert refused.headers["Retry-After"] == "1" and "ulimit -n" in refused.text
