"""Pages of the docs: links and anchors lead somewhere, files that are named are there, tables fit."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs_world import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "recipes/README.md")),
]
# The order in which somebody new reads; other pages may stand between them.
ORDER = (
    *(
        "quickstart",
        "own_task",
        "agents",
        "scaling",
        "watching",
        "troubleshooting",
        "flags",
        "plugins",
        "api",
    ),
    *("metrics", "performance", "algorithms", "architecture", "reliability", "comparison"),
)
WIDEST_TABLE = 110
# Tables of these pages have more columns, and are read in a browser.
WIDER_TABLES = {"README.md": 120, "performance.md": 190, "flags.md": 2000}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of headings, where the site and GitHub agree on them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        site, github = re.sub(r"[-\s]+", "-", plain), plain.replace(" ", "-")
        found |= {site} & {github}
    return found


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\[[^]]*\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://", "mailto:")):
            yield target


@each_page
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: no such file"
        if page.parent == DOCS:
            assert DOCS in there.parents, f"{target}: the site has only what is in docs/"
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), target


@each_page
def test_tables_fit_a_terminal(page):
    widest = WIDER_TABLES.get(page.name, WIDEST_TABLE)
    wide = [line for line in prose(page).splitlines() if line.startswith("|") and len(line) > widest]
    assert not wide, f"make it a list or a narrower table: {wide[0]}"


@each_page
def test_files_that_are_named_are_there(page):
    for name in re.findall(
        r"`((?:slime|tests|examples|benchmarks|recipes|launchers)/[\w./-]*\w)`", prose(page)
    ):
        assert (ROOT / name).exists(), name


def test_pages_that_the_code_names_are_there():
    for path in (ROOT / "slime").rglob("*.py"):
        for name in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path}: {name}"


def test_every_page_is_in_the_navigation_in_the_order_of_reading():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    kinds = [title for section in config["nav"] for title in section]
    assert kinds == ["Home", "Tutorials", "How-to guides", "Reference", "Explanation"]
    pages = [entry for section in config["nav"] for value in section.values() for entry in _files(value)]
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))
    places = [pages.index(f"{name}.md") for name in ORDER]
    assert places == sorted(places)
    assert (
        config["strict"] and config["plugins"] == ["search", "offline"] and config["theme"]["font"] is False
    )


def _files(value) -> list[str]:
    return [value] if isinstance(value, str) else [file for entry in value for file in entry.values()]


def test_every_page_has_one_title():
    for page in DOCS.glob("*.md"):
        assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1, page.name
