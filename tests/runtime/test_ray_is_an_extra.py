"""Ray is installed by those who have several machines: what needs it says so."""

import tomllib
from pathlib import Path

import pytest
from argument_helpers import declared

from slime.runtime import create_runtime

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_a_run_on_ray_without_ray_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"--runtime ray needs the package ray: pip install 'slime-rl\[ray\]'"
    ):
        create_runtime(declared(runtime="ray"), tmp_path, "x")


def test_every_extra_that_a_message_names_exists():
    extras = PROJECT["optional-dependencies"]
    assert {"ray", "hf", "data", "all"} <= extras.keys()
    assert not any(entry.startswith("ray") for entry in PROJECT["dependencies"])
