"""AGENTS.md and docs/llms.txt: every command, file and link that they name exists."""

import re

import pytest
from docs_world import ROOT

from slime.arguments.parser import build_parser, known_options
from slime.cli.main import COMMANDS

AGENTS, LLMS = ROOT / "AGENTS.md", ROOT / "docs" / "llms.txt"
both = pytest.mark.parametrize("page", (AGENTS, LLMS), ids=lambda page: page.name)


def code(page):
    """Lines of ```bash blocks, and `commands` within sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.partition("#")[0].strip() for line in "\n".join([*blocks, *inline]).splitlines()]


@both
def test_commands_exist(page):
    lines = code(page)
    commands = [found[1] for line in lines if (found := re.match(r"(?:\.venv/bin/)?slime ([\w-]+)", line))]
    assert commands and set(commands) <= {*COMMANDS, "help"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (line.removeprefix("make ") for line in lines if line.startswith("make ")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@both
def test_paths_and_flags_exist(page):
    words = [word for line in code(page) for word in line.split()]
    named = {word for word in words if re.match(r"(slime|tests|examples|benchmarks|recipes|docs)/", word)}
    assert [name for name in named if not (ROOT / name).exists()] == []
    known = set(known_options(build_parser(None)[0]))
    flags = {line.split()[0] for line in code(page) if line.startswith("--")}
    assert flags <= known, flags - known


@both
def test_links_lead_to_files(page):
    targets = re.findall(r"\[[^]]+\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    assert targets and [target for target in targets if not (page.parent / target).is_file()] == []


def test_llms_txt_lists_every_page():
    """Its form is that of llmstxt.org: a title, a summary as a quote, sections of links with a line each."""
    text = LLMS.read_text(encoding="utf-8")
    assert re.match(r"# slime\n\n> ", text)
    listed = re.findall(r"^- \[[^]]+\]\(([\w.]+)\): \S", text, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(listed) == sorted(pages)


def test_agents_md_is_short():
    assert len(AGENTS.read_text(encoding="utf-8").splitlines()) <= 120
