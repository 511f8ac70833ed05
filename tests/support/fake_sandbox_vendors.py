"""Fake packages of sandbox vendors: the names, parameters and exceptions of theirs that slime uses.

Commands really run, in a local box. `faults` are raised by the next calls, one each.
`tests/agent/sandbox/test_vendors.py` compares parameters with the real packages where these are installed.
"""

import types

from slime.agent.sandbox import LocalSandbox

faults: list[Exception] = []
alive: set[str] = set()
made_with: list[dict] = []
renewed: list[tuple[str, int | None]] = []


def _fault():
    if faults:
        raise faults.pop(0)


class ConnectError(Exception):
    """As of an HTTP library: the call did not arrive."""


class _Base:
    async def _begin(self, **wanted):
        _fault()
        made_with.append(wanted)
        self._box = await LocalSandbox().start()
        self.sandbox_id = self.id = self._box.sandbox_id
        alive.add(self.id)
        return self

    def _renewed(self, timeout=None):
        _fault()
        renewed.append((self.id, timeout))

    async def _end(self):
        _fault()
        await self._box.close()
        alive.discard(self.id)


# -- e2b


class SandboxException(Exception):
    pass


class NotFoundException(SandboxException):
    pass


class TimeoutException(SandboxException):
    pass


class CommandExitException(SandboxException):
    def __init__(self, exit_code, stdout, stderr):
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr


class E2BFake(_Base):
    @classmethod
    async def create(cls, template=None, timeout=None, metadata=None):
        made = await cls()._begin(template=template, timeout=timeout, metadata=metadata)
        made.commands, made.files = E2BCommands(made._box), E2BFiles(made._box)
        return made

    async def set_timeout(self, timeout):
        self._renewed(timeout)

    async def kill(self):
        await self._end()


class E2BCommands:
    def __init__(self, box):
        self._box = box

    async def run(self, cmd, background=None, envs=None, user=None, cwd=None, timeout=60):
        _fault()
        code, out, err = await self._box.exec(cmd, env=envs, user=user, timeout=timeout)
        if code == 124:
            raise TimeoutException("deadline exceeded")
        if code != 0:
            raise CommandExitException(code, out, err)
        return types.SimpleNamespace(exit_code=0, stdout=out, stderr=err)


class E2BFiles:
    def __init__(self, box):
        self._box = box

    async def write(self, path, data, user=None, request_timeout=None):
        _fault()
        await self._box.write_file(path, data.read())

    async def read(self, path, format="text", user=None, request_timeout=None):
        _fault()
        data = await self._box.read_bytes(path)
        if data is None:
            raise NotFoundException(path)
        return bytearray(data)


def fake_e2b():
    module = types.ModuleType("e2b")
    module.AsyncSandbox = E2BFake
    for error in (CommandExitException, TimeoutException, NotFoundException):
        setattr(module, error.__name__, error)
    return module


# -- daytona


class DaytonaNotFoundError(Exception):
    pass


class CreateSandboxFromSnapshotParams:
    def __init__(self, *, auto_stop_interval=None, auto_delete_interval=None):
        self.wanted = {"auto_stop_interval": auto_stop_interval, "auto_delete_interval": auto_delete_interval}


class CreateSandboxFromImageParams(CreateSandboxFromSnapshotParams):
    def __init__(self, *, image, **ends):
        super().__init__(**ends)
        self.wanted["image"] = image


class DaytonaBox(_Base):
    @property
    def process(self):
        return self

    @property
    def fs(self):
        return self

    async def exec(self, command, cwd=None, env=None, timeout=None):
        _fault()
        code, out, err = await self._box.exec(command, env=env, timeout=timeout)
        return types.SimpleNamespace(exit_code=code, result=out + err)

    async def refresh_activity(self):
        self._renewed()

    async def upload_file(self, src, dst, timeout=1800):
        _fault()
        await self._box.write_file(dst, src)

    async def download_file(self, *args):
        _fault()
        data = await self._box.read_bytes(args[0])
        if data is None:
            raise DaytonaNotFoundError(args[0])
        return data


class AsyncDaytona:
    async def create(self, params=None, *, timeout=60):
        return await DaytonaBox()._begin(**params.wanted)

    async def delete(self, sandbox, timeout=60, wait=False):
        await sandbox._end()

    async def close(self):
        pass


def fake_daytona():
    module = types.ModuleType("daytona")
    for thing in (
        AsyncDaytona,
        CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams,
        DaytonaNotFoundError,
    ):
        setattr(module, thing.__name__, thing)
    return module
