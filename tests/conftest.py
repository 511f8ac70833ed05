"""Settings of the whole suite. Nothing heavy is imported here, so that pure tests answer in a second."""

import gc
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import warm_start
from hypothesis import HealthCheck, settings

# Generated examples are the same in every run, so that a red run can be repeated; a machine may be slow.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# `pytest --hypothesis-profile default` looks further, with new examples each time.
settings.load_profile("repeatable")

# Workers of `pytest -n` share the cores: each computes with one thread, and so do the processes it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)

# Ray ends workers on a machine whose memory is nearly full, whoever has filled it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# What is imported while tests are collected stays: looking for garbage in it, then and after every test that
# makes some, costs more than most tests.
gc.disable()

# Runs of training, engines and workers are forked from a process that has imported what they need, and so are
# the workers of `pytest -n`.
warm_start.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file all of whose tests are left out by `-m` is not imported: Megatron alone takes seconds.

    Where it is named on the command line, pytest says how many of its tests are left out.
    """
    wanted = config.option.markexpr
    if collection_path.suffix != ".py" or " or " in wanted:
        return None
    if any(Path(word.partition("::")[0]).absolute() == collection_path for word in config.args):
        return None
    marks = re.search(r"^pytestmark = (\[.*?\]|.*?)$", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    kinds = re.findall(r"pytest\.mark\.(\w+)", marks[1]) if marks else []
    return True if any(f"not {kind}" in wanted for kind in kinds) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give all files whose tests read the whole source to one worker, which parses it once.

    The same holds for the contracts of engines, which share a running engine.
    """
    from xdist.scheduler import LoadFileScheduling

    looking = {
        str(path.relative_to(config.rootpath))
        for path in (config.rootpath / "tests").rglob("test_*.py")
        if "from source_trees import" in path.read_text()
    }

    class OneParser(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            shared = "contracts" if file.startswith("tests/contracts/") else file
            return "source trees" if file in looking else shared

    return OneParser(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    warm_start.close()


@pytest.fixture(autouse=True)
def _log_lines_end_with_their_test():
    """What a test let `configure_logger` add would write to its captured stderr, which is closed by then."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [found for found in root.handlers if found.get_name() == "slime"]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _process_groups_end_with_their_file():
    """Another file of the same worker begins without one, in whatever order they come."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
