"""The attacks on sandboxes once more as a user without rights, where the suite itself runs as root."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from patience import LONG_S

ROOT = Path(__file__).parents[3]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
ATTACKS = (
    "tests/agent/sandbox/test_hostile_commands.py",
    pytest.param("tests/agent/sandbox/test_forged_replies.py", marks=pytest.mark.slow),
    pytest.param("tests/agent/rewards/test_cheating_programs.py", marks=pytest.mark.slow),
)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="the suite runs as an ordinary user already, or setpriv is missing",
)


def readable_copy(target):
    """Copy what these tests import to a folder that everybody can read: a checkout may be root's own."""
    for name in ("slime", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)  # with what is compiled already
        else:
            shutil.copy(source, target / name)
    subprocess.run(["chmod", "-R", "a+rX", str(target)], check=True)


@pytest.fixture(scope="module")
def checkout():
    with tempfile.TemporaryDirectory(prefix="slime-readable-") as target:
        readable_copy(Path(target))
        yield target


def interpreter(environment):
    """Return a Python that an ordinary user can start with the packages of this suite."""
    imports = "import hypothesis, psutil, pytest, slime.agent.sandbox, subprocess, sys"
    restarts = "subprocess.run([sys.executable, '-c', ''], check=True)"
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        probe = [*NOBODY, candidate, "-c", f"{imports}; {restarts}"]
        if subprocess.run(probe, env=environment, cwd="/", capture_output=True).returncode == 0:
            return candidate
    pytest.skip("an ordinary user can start no interpreter with the packages of this suite")


@pytest.mark.parametrize("file", ATTACKS)
def test_attacks_fail_for_an_ordinary_user_too(file, checkout):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    paths = [checkout, *(path for path in sys.path if "site-packages" in path)]
    environment |= {"PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}
    python = interpreter(environment)
    command = [python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", file]
    done = subprocess.run(
        [*NOBODY, *command],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * LONG_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
