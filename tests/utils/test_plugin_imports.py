"""Imports that would fail in the first rollout are found before the start, and others are not."""

import sys
import textwrap

import pytest

from slime.utils.misc import load_function
from slime.utils.plugin_imports import missing_imports


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write files of a user's project, which lies on the path, and report what its plug-in would miss."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(plugin="mine.plugin.reward", **files):
        for name, source in files.items():
            file = tmp_path / (name.replace("__", "/").replace("/init", "/__init__") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        load_function.cache_clear()
        load_function(plugin.replace("ROOT", str(tmp_path)))
        return missing_imports(plugin.replace("ROOT", str(tmp_path)))

    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("mine", "helper"):
            del sys.modules[name]


def lines(found, *, certain=True):
    return [f"{entry.file.name}:{entry.line} {entry.reason}" for entry in found if entry.certain is certain]


def test_a_lazy_import_of_a_module_that_slime_lacks_is_found_with_its_place(project):
    found = project(
        mine__plugin="""
        def reward(args, sample):
            from slime.utils.mics import load_function
            import slime.no_such.thing
            return 1.0
        """
    )
    assert lines(found) == [
        "plugin.py:3 slime has no module slime.utils.mics; did you mean slime.utils.misc.",
        "plugin.py:4 slime has no module slime.no_such.thing.",
    ]
    assert "plugin.py:3 has `from slime.utils.mics import load_function`, but slime" in str(found[0])


def test_a_name_that_a_module_lacks_is_found_without_importing_the_module(project):
    for name in ("slime.algorithms.kl", "slime.utils.ppo_utils", "slime.utils.eval_config"):
        sys.modules.pop(name, None)
    found = project(
        mine__plugin="""
        def reward(args, sample):
            from slime.algorithms.kl import compute_approx_kl, compute_aprox_kl
            from slime.utils.ppo_utils import compute_log_probs, no_such
            from slime.utils.eval_config import EvalDatasetConfig, nothing
            from slime.utils import logging_utils, nowhere
            from slime.ray import rollout
        """
    )
    assert lines(found) == [
        "plugin.py:3 slime.algorithms.kl has no 'compute_aprox_kl'; did you mean 'compute_approx_kl'.",
        "plugin.py:4 slime.utils.ppo_utils has no 'no_such'.",
        "plugin.py:5 slime.utils.eval_config has no 'nothing'.",
        "plugin.py:6 slime.utils has no 'nowhere'.",
    ]
    assert "slime.utils.ppo_utils" not in sys.modules


def test_the_users_own_modules_are_searched_and_not_executed(project):
    found = project(
        mine__plugin="""
        def reward(args, sample):
            from mine.scoring import score
            return score(sample)
        """,
        mine__scoring="""
        import surely_not_installed_a
        raise SystemExit("this module must not be executed")
        def score(sample):
            from .deeper import depth, height; depth()
            import surely_not_installed_b.part
        """,
        mine__deeper="""
        def depth():
            from ..outside import x
        """,
        mine__init="",
    )
    assert "mine.scoring" not in sys.modules
    assert [line.split(" ")[0] for line in lines(found)] == [
        *("scoring.py:2", "scoring.py:5", "scoring.py:6"),
        "deeper.py:3",
    ]
    assert "there is no module surely_not_installed_a: install it" in lines(found)[0]
    assert "mine.deeper has no 'height'" in lines(found)[1]


def test_what_the_plug_in_never_calls_or_only_sometimes_is_no_error(project):
    found = project(
        mine__plugin="""
        def reward(args, sample):
            if args.judge:
                import surely_not_installed_a
            return helper()

        def helper():
            return Scorer().score()

        class Scorer:
            def score(self):
                import surely_not_installed_b

        def plot():
            import surely_not_installed_c
            import mine.plots
        """,
        mine__plots="import surely_not_installed_d\n",
        mine__init="",
    )
    assert [line.split(" ")[0] for line in lines(found)] == ["plugin.py:12"]
    assert len(lines(found, certain=False)) == 3


def test_imports_that_may_fail_are_left_alone(project):
    found = project(
        mine__plugin="""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import surely_not_installed_a
        try:
            import surely_not_installed_b
        except ImportError:
            surely_not_installed_b = None

        def reward(args, sample):
            try:
                from slime.not_there import x
            except (KeyError, ModuleNotFoundError):
                from slime.not_there_either import x
            import os.path, torch.nn, xml.etree.ElementTree as tree, concurrent.futures
            from transformers import AutoTokenizer, SurelyLazy
            from mine.dynamic import anything
            from mine.made import listed
            from . import dynamic
        """,
        mine__dynamic="def __getattr__(name): return name\n",
        mine__made="globals().update(listed=1)\n",
        mine__init="",
    )
    assert found == []


def test_a_file_without_a_package_has_no_relative_imports(project):
    found = project(
        "ROOT/lone.py:reward",
        lone="""
        def reward(args, sample):
            from .helper import help
            import helper
        """,
        helper="def help(): pass\n",
    )
    assert len(found) == 1 and "is not in such a package" in found[0].reason and found[0].line == 3


def test_a_module_that_changes_the_path_is_believed(project):
    found = project(
        mine__plugin="""
        def reward(args, sample):
            import sys
            sys.path.insert(0, args.tools)
            import tools_of_mine
            from slime.no_such import thing
        """
    )
    assert lines(found) == ["plugin.py:6 slime has no module slime.no_such."]


def test_aliases_and_packages_are_followed(project):
    found = project(
        mine__plugin="from mine.impl import score as reward\n",
        mine__impl__init="""
        from mine.impl.inner import worker as run

        async def score(args, sample):
            return run()
        """,
        mine__impl__inner="""
        def worker():
            import surely_not_installed_a
        """,
        mine__init="",
    )
    assert [line.split(" ")[0] for line in lines(found)] == ["inner.py:3"]


def test_a_broken_or_missing_source_is_no_finding(project):
    found = project(
        mine__plugin="""
        def reward(args, sample):
            import mine.broken
        """,
        mine__broken="def (:\n",
        mine__init="",
    )
    assert found == []
    assert missing_imports("math.sqrt") == [] and missing_imports("slime.rollout.rm_hub.async_rm") == []


def test_the_imports_of_an_environment_are_looked_up_too(project, tmp_path):
    from slime.agent.environments import own

    project(
        "ROOT/maze.py:Maze",
        maze="""
        class Maze:
            def reset(self, item): ...
            def step(self, action):
                from slime.utils.mics import x
        """,
    )
    with pytest.raises(ValueError, match=r"--env .*maze.py:Maze: .*maze.py:5 has .*slime.utils.misc"):
        own.check(f"{tmp_path}/maze.py:Maze")
