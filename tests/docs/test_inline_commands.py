"""Commands outside the blocks that test_docs_commands tries: within sentences, in the heads of recipes and
launchers, in the docstrings of benchmarks. Each names a command that there is, flags that it has, and files
and targets of the repository that exist.
"""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs_world import ROOT

from slime.arguments.parser import build_parser, known_options
from slime.cli.main import COMMANDS
from slime.cli.tasks import TASKS

PROGRAMS = "slime|python|make|pip|pytest|sh"
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(
        ROOT / name
        for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md")
    ),
]
HEADS = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "launchers").iterdir()]
BLOCK = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(rf"(?<!`)`((?:{PROGRAMS})\s[^`]*)`(?!`)")
HEAD = re.compile(
    rf"^#.*?\b((?:{PROGRAMS}) (?:train|doctor|plan|-m|\S+\.(?:py|sh)|[a-z-]+ --)[^\n`;,\]]*)", re.MULTILINE
)
DOCSTRING = re.compile(rf"^    ((?:{PROGRAMS}) \S[^\n]*)", re.MULTILINE)
OURS = ("benchmarks/", "examples/", "launchers/", "recipes/", "tests/")


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for text in INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
            yield page.name, " ".join(text.split())
    for file in HEADS:
        for text in HEAD.findall(file.read_text(encoding="utf-8")):
            yield str(file.relative_to(ROOT)), text
    for file in (ROOT / "benchmarks").glob("*.py"):
        for text in DOCSTRING.findall(file.read_text(encoding="utf-8").split('"""')[1]):
            yield file.name, text


def by_place() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for place, text in commands():
        found.setdefault(place, []).append(text)
    return found


FOUND = by_place()


@pytest.mark.parametrize("place", sorted(FOUND))
def test_commands_within_sentences_and_comments_are_some(place):
    wrong = [f"{text}: {why}" for text in FOUND[place] if (why := mistake(text)) is not None]
    assert not wrong, "\n".join(wrong)


def test_a_command_that_is_none_would_be_found():
    for text in (
        "slime trian",
        "slime train --no-such-flag",
        "slime samples RUN --wurst 5",
        "make no-such-target",
        "make test-leaf-nothing",
        "python benchmarks/no_such.py",
        "python benchmarks/train_step.py --no-such-flag",
        "pip install 'slime-rl[nothing]'",
        "slime train --config recipes/gpu24/nothing.yaml",
    ):
        assert mistake(text) is not None, text


def mistake(text: str) -> str | None:
    """What is wrong with a command; None: nothing that can be seen without running it."""
    words = shlex.split(text.partition(" > ")[0].partition(" && ")[0], comments=True)
    missing = [word for word in words if word.startswith(OURS) and not list(ROOT.glob(word.rstrip("/")))]
    if missing:
        return f"there is no {missing[0]}"
    flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    match words:
        case ["slime", name, *_]:
            if name != "help" and name not in COMMANDS:
                return f"there is no command {name}"
            unknown = flags - {"--help"} - flags_of(name)
            return f"it has no {sorted(unknown)}" if unknown else None
        case ["make", target, *_]:
            makefile = (ROOT / "Makefile").read_text()
            rule = rf"^LEAF_{target.removeprefix('test-leaf-')} :=" if "-leaf-" in target else rf"^{target}:"
            return None if re.search(rule, makefile, re.MULTILINE) else f"there is no target {target}"
        case ["pip", "install", *_]:
            unknown = set(re.findall(r"[\w-]+", "".join(re.findall(r"slime-rl\[(.*?)\]", text)))) - extras()
            return f"there is no extra {sorted(unknown)}" if unknown else None
        case ["python" | "sh", script, *_] if script.endswith((".py", ".sh")) and script.startswith(OURS):
            source = (ROOT / script).read_text()
            given = flags if "--run" not in words else set()  # the rest is another command's
            unknown = {flag for flag in given if flag not in source and not flag.startswith("--sglang-")}
            return f"it has no {sorted(unknown)}" if unknown else None
    return None


@cache
def flags_of(name: str) -> frozenset[str]:
    """Of a command: those of a run, and what its own code names."""
    spec = importlib.util.find_spec(COMMANDS[name]) if name in COMMANDS else None
    assert spec is None or spec.origin is not None
    files = [] if spec is None else [Path(spec.origin)]
    if files and files[0].name == "__init__.py":
        files = list(files[0].parent.glob("*.py"))
    own = {flag for file in files for flag in re.findall(r"\"(--[a-z][a-z-]*)\"", file.read_text())}
    runs = {"train", "train-async", "doctor", "quickstart", "simulate", "plan", "docs", "sweep", *TASKS}
    own |= {option for task in TASKS.values() for option in task.options} if name in TASKS else set()
    return frozenset(own | set(known_options(build_parser(None)[0])) if name in runs else own)


@cache
def extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return frozenset(project["optional-dependencies"])
