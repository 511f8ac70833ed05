"""Without protection programs of a model are refused; who wants none asks for it by name."""

import asyncio
import logging
from pathlib import Path

import pytest
from argument_helpers import declared

from slime.agent.sandbox import SandboxUnavailable, isolation, open_sandbox
from slime.agent.tools import BoxTools
from slime.preflight import packages
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample

REMEDIES = ("apt-get install bubblewrap", "user namespaces", "--sandbox e2b", "--sandbox plain")


@pytest.fixture
def unprotected(monkeypatch):
    """A machine without bubblewrap and without user namespaces."""
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    for cached in (isolation.best_isolation, isolation.report_start):
        cached.cache_clear()
    yield
    isolation.best_isolation.cache_clear()


def sample():
    response = "```python\ndef double(x): return x * 2\n```"
    return Sample(index=3, prompt="p", response=response, label=["assert double(2) == 4"])


def test_programs_are_refused_where_nothing_protects_the_machine(unprotected):
    async def inner():
        async with open_sandbox("local") as box:
            await box.exec("true")

    with pytest.raises(SandboxUnavailable) as refused:
        asyncio.run(inner())
    assert all(remedy in str(refused.value) for remedy in REMEDIES)
    with pytest.raises(SandboxUnavailable, match="programs of the model are refused"):
        asyncio.run(async_rm(declared(rm_type="code"), sample()))


def test_the_preflight_check_refuses_before_the_start(unprotected):
    def found(**settings):
        args = declared(rm_type="code", **settings)
        return {one.kind: one.text for one in packages.check_packages(args) if one.subject == "--sandbox"}

    assert all(remedy in found()["error"] for remedy in REMEDIES)
    assert "error" not in found(sandbox="plain")


def test_plain_is_a_value_of_its_own_and_warns(unprotected, caplog):
    async def inner():
        async with BoxTools("plain", timeout_s=60) as box:
            await box.write_file("a.py", "print(6 * 7)")
            assert await box.shell("python3 a.py") == "42"
            assert await box.python("print(open('a.py').read())") == "print(6 * 7)"
            assert await box.read_file("a.py") == "1 print(6 * 7)"

    with caplog.at_level(logging.WARNING):
        asyncio.run(inner())
    assert "without protection (--sandbox plain)" in caplog.text
    assert asyncio.run(async_rm(declared(rm_type="code", sandbox="plain"), sample())) == 1.0


def test_every_image_of_the_dockerfile_includes_bubblewrap():
    text = (Path(__file__).parents[3] / "Dockerfile").read_text()
    stages = text.split("\nFROM ")[1:]
    assert len(stages) == 2
    assert all("bubblewrap" in stage for stage in stages)
