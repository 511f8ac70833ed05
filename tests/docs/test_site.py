"""What the site takes from the clone that it is built in."""

import importlib.util
import subprocess
from types import SimpleNamespace

import pytest
from docs_world import ROOT

import slime

HOOKS = ROOT / "docs/theme/hooks.py"


@pytest.fixture
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", HOOKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://example.org/team/slime.git", "https://example.org/team/slime"),
        ("https://user:secret@example.org/team/slime", "https://example.org/team/slime"),
        ("git@example.org:team/slime.git", "https://example.org/team/slime"),
        ("ssh://git@example.org/team/slime.git", "https://example.org/team/slime"),
        ("/home/someone/slime", ""),
        ("../slime.git", ""),
    ],
)
def test_the_repository_is_the_origin_of_the_clone(hooks, origin, address, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    assert hooks.repository() == ""
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", origin], check=True)
    assert hooks.repository() == address


def test_the_version_is_that_of_the_package(hooks):
    config = SimpleNamespace(site_name="slime", repo_url="https://example.org/slime")
    assert hooks.on_config(config).site_name == f"slime {slime.__version__}"


def test_links_show_titles_where_the_text_is_a_file_name(hooks):
    page = SimpleNamespace(is_homepage=True, meta={})
    config = SimpleNamespace(nav=[{"Home": "index.md"}, {"How-to guides": [{"Prompt data": "data.md"}]}])
    text = "[data.md](data.md), [rows](data.md), [data.md](data.md#rows), `data.md`"
    shown = hooks.on_page_markdown(text, page, config, None)
    assert shown == "[Prompt data](data.md), [rows](data.md), [Prompt data](data.md#rows), `data.md`"
    assert page.meta == {"hide": ["navigation", "toc"]}
