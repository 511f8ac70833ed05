"""Boxes of vendors keep the promises of local ones; their packages are fakes here, with real commands."""

import asyncio
import importlib
import inspect
import subprocess
import sys

import fake_sandbox_vendors as fakes
import pytest

from slime.agent.sandbox import (
    CommandFailed,
    DaytonaSandbox,
    E2BSandbox,
    Sandbox,
    SandboxDied,
    SandboxUnavailable,
    open_sandbox,
    vendor,
)

VENDORS = {"e2b": (E2BSandbox, fakes.fake_e2b), "daytona": (DaytonaSandbox, fakes.fake_daytona)}


@pytest.fixture(params=VENDORS)
def vendor_class(request, monkeypatch):
    made, fake = VENDORS[request.param]
    monkeypatch.setitem(sys.modules, request.param, fake())
    monkeypatch.setattr(vendor, "_FIRST_WAIT_S", 0.0)
    fakes.faults.clear()
    fakes.made_with.clear()
    fakes.renewed.clear()
    yield made
    assert not fakes.alive


def in_box(made, work, **options):
    async def inner():
        async with made("an-image", **options) as box:
            return await work(box)

    return asyncio.run(inner())


def test_commands_and_files_are_as_in_a_local_box(vendor_class):
    async def work(box):
        assert isinstance(box, Sandbox)
        assert box.sandbox_id in fakes.alive
        assert await box.exec("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
        assert (await box.exec("echo $GIVEN", env={"GIVEN": "x"}))[1] == "x\n"
        with pytest.raises(CommandFailed, match="exit code 4"):
            await box.exec("exit 4", check=True)
        code, _, err = await box.exec("sleep 1000", timeout=0.3)
        assert (code, "past its limit of 0.3 s" in err) == (124, True)
        await box.write_file("/work/a", "ä")
        assert await box.read_file("/work/a") == "ä"
        assert await box.read_file("/work/none") == ""

    in_box(vendor_class, work)


def test_a_call_that_did_not_arrive_is_made_again(vendor_class):
    async def work(box):
        fakes.faults[:] = [fakes.ConnectError("reset"), ConnectionResetError("reset")]
        await box.write_file("/work/a", "x")
        fakes.faults[:] = [fakes.ConnectError("reset")]
        assert (await box.exec("echo twice is fine", idempotent=True))[0] == 0

    in_box(vendor_class, work)


def test_a_command_whose_fate_is_unknown_is_not_run_twice(vendor_class):
    async def work(box):
        fakes.faults[:] = [fakes.ConnectError("reset")]
        with pytest.raises(SandboxDied, match=r"ConnectError: reset \(try 1 of"):
            await box.exec("echo once >> log")
        assert await box.read_file("/work/log") == ""

    in_box(vendor_class, work)


def test_a_vendor_that_stays_away_is_named_after_the_last_try(vendor_class):
    async def work(box):
        fakes.faults[:] = [fakes.ConnectError("reset")] * 3
        with pytest.raises(SandboxDied, match="try 3 of 3"):
            await box.read_file("/work/a")

    in_box(vendor_class, work, rpc_retries=3)


def test_an_error_that_no_second_try_mends_is_not_tried_again(vendor_class):
    async def work(box):
        fakes.faults[:] = [PermissionError("wrong key"), AssertionError("not reached")]
        with pytest.raises(PermissionError):
            await box.read_file("/work/a")
        fakes.faults.clear()

    in_box(vendor_class, work)


def test_a_box_ends_by_itself_when_nobody_ends_it(vendor_class):
    async def work(box):
        pass

    in_box(vendor_class, work, timeout=120)
    wanted = fakes.made_with[0]
    assert wanted.get("timeout") == 120 or wanted.get("auto_stop_interval") == 2


def test_a_box_lives_as_long_as_its_owner_and_no_longer(vendor_class, monkeypatch, caplog):
    """The lease is renewed during an episode and its verifier, also after a renewal that failed."""
    monkeypatch.setattr(vendor, "_RENEWALS", 120 / 0.01)

    async def work(box):
        while len(fakes.renewed) < 2:
            await asyncio.sleep(0.01)
        fakes.faults[:] = [fakes.ConnectError("reset")]
        while fakes.faults or len(fakes.renewed) < 4:
            await asyncio.sleep(0.01)

    in_box(vendor_class, work, timeout=120)
    assert {lease for _, lease in fakes.renewed} == {120 if vendor_class is E2BSandbox else None}
    assert "was not renewed (reset)" in caplog.text


def test_the_image_goes_to_e2b_as_template_or_by_the_key_of_a_gateway(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", fakes.fake_e2b())
    fakes.made_with.clear()

    async def work(box):
        pass

    in_box(E2BSandbox, work)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    in_box(E2BSandbox, work)
    assert [one["template"] for one in fakes.made_with] == ["an-image", None]
    assert [one["metadata"] for one in fakes.made_with] == [None, {"image": "an-image"}]


@pytest.mark.parametrize("kind", VENDORS)
def test_a_missing_package_is_named_with_its_extra(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)

    async def start():
        async with open_sandbox(kind):
            pass

    with pytest.raises((SandboxUnavailable, ValueError), match=rf"slime-rl\[{kind}\]|__spec__"):
        asyncio.run(start())
    with pytest.raises(SandboxUnavailable, match=rf"pip install 'slime-rl\[{kind}\]'"):
        asyncio.run(VENDORS[kind][0]("x").__aenter__())


def parameters(function):
    return set(inspect.signature(function).parameters) - {"self"}


def test_the_fake_of_e2b_has_only_parameters_of_the_real_one():
    e2b = pytest.importorskip("e2b", reason="pip install 'slime-rl[e2b]'")
    commands = importlib.import_module("e2b.sandbox_async.commands.command").Commands
    files = importlib.import_module("e2b.sandbox_async.filesystem.filesystem").Filesystem
    for fake, real in (
        (fakes.E2BFake.create, e2b.AsyncSandbox.create),
        (fakes.E2BCommands.run, commands.run),
        (fakes.E2BFiles.write, files.write),
        (fakes.E2BFiles.read, files.read),
        (fakes.E2BFake.set_timeout, e2b.AsyncSandbox.set_timeout),
    ):
        assert parameters(fake) <= parameters(real)
    for error in (fakes.CommandExitException, fakes.TimeoutException, fakes.NotFoundException):
        assert hasattr(e2b, error.__name__)


def test_the_fake_of_daytona_has_only_parameters_of_the_real_one():
    daytona = pytest.importorskip("daytona", reason="pip install 'slime-rl[daytona]'")
    process = importlib.import_module("daytona._async.process").AsyncProcess
    files = importlib.import_module("daytona._async.filesystem").AsyncFileSystem
    for fake, real in (
        (fakes.AsyncDaytona.create, daytona.AsyncDaytona.create),
        (fakes.AsyncDaytona.delete, daytona.AsyncDaytona.delete),
        (fakes.DaytonaBox.exec, process.exec),
        (fakes.DaytonaBox.upload_file, files.upload_file),
        (fakes.DaytonaBox.refresh_activity, daytona.AsyncSandbox.refresh_activity),
    ):
        assert parameters(fake) <= parameters(real)
    fields = set(daytona.CreateSandboxFromImageParams.model_fields)
    assert {"image", "auto_stop_interval", "auto_delete_interval"} <= fields
    assert hasattr(daytona, "DaytonaNotFoundError")


def test_importing_sandboxes_imports_neither_vendors_nor_torch():
    code = (
        "import sys, slime.agent.sandbox; print([m for m in ('torch', 'e2b', 'daytona') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
