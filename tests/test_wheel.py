"""What a wheel holds: the package with its types, and nothing of the tests."""

import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "slime", folder / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


def test_it_holds_every_file_of_the_package_and_no_other(wheel):
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "slime").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == files and "slime/py.typed" in held


def test_it_needs_no_ray_and_starts_the_command(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith("METADATA")]
    needs = [line for line in wheel.read(name).decode().splitlines() if line.startswith("Requires-Dist")]
    plain = [line for line in needs if "extra ==" not in line]
    assert not any("ray" in line.split()[1] for line in plain)
    for package in ("torch", "transformers", "cloudpickle", "math-verify", "matplotlib"):
        assert any(line.split()[1].startswith(package) for line in plain)
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "slime = slime.cli.main:main" in wheel.read(points).decode()


def test_the_page_opens_its_recorded_run_from_it(wheel, tmp_path):
    wheel.extractall(tmp_path)
    command = [sys.executable, "-m", "slime", "dashboard", "--demo", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = process.stdout.readline().split()[-1].partition("#")[0]
            for path in ("", "js/main.js", "vendor/uPlot.min.js", "api/runs/demo/samples?limit=1"):
                with urllib.request.urlopen(address + path, timeout=60) as response:
                    assert response.status == 200 and len(response.read()) > 100
        finally:
            process.terminate()
