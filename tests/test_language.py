"""Docstrings, comments and messages of the package use plain English: no private phrases, no fragments.

Only openings and phrases that are always wrong are listed; ambiguous words are left to the reviewer.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_trees import nodes_in

ROOT = Path(__file__).parents[1]
OPENINGS = ("The same", "Those", "That of", "Of ", "As `", "It is", "It and", "They are", "Who ", "It ")
# A docstring that begins so is a fragment ("What the engine holds.") instead of a sentence or a verb phrase.
FRAGMENTS = ("What ", "Whether ", "How ", "Where ", "When ", "Why ", "Which ")
MAX_FRAGMENTS = 25
PHRASES = (
    "the same of",
    "those that",
    "is begun",
    "begins anew",
    "goes on",
    "go on",
    "held against",
    "what it became",
    "is told",
    "are told",
    "was told",
)
_PHRASE = re.compile(r"\b(?:" + "|".join(r"\s+".join(p.split()) for p in PHRASES) + r")\b", re.IGNORECASE)

_LETTERS = re.compile("|".join("".join(p.split()) for p in PHRASES))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, including strings below the fields of classes."""
    for node in nodes_in(source):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before: ast.stmt | None = None
        for place, statement in enumerate(node.body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            documents = place == 0 or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()
            before = statement


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment; comments on consecutive lines are one text.

    Nothing where no phrase can be in one: that takes a fraction of the time.
    """
    if not _LETTERS.search(re.sub(r"[^a-z]+", "", source.lower())):
        return
    first, last, texts = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, alone = token.start[0], token.line.lstrip().startswith("#")
        if texts and not (alone and line == last + 1):
            yield first, " ".join(texts)
            texts = []
        first = first if texts else line
        texts.append(token.string.lstrip("# "))
        last = line
    if texts:
        yield first, " ".join(texts)


def phrases(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every forbidden phrase in docstrings, comments and other strings."""
    strings = (
        (node.lineno, node.value)
        for node in nodes_in(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for line, text in (*strings, *comments(source)):
        for found in _PHRASE.finditer(text):
            yield line, found[0]


def openings(source: str, forbidden: tuple[str, ...]) -> list[tuple[int, str]]:
    """Line and text of every docstring with a forbidden opening."""
    return [found for found in docstrings(source) if found[1].startswith(forbidden)]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    files = (ROOT / "slime").rglob("*.py")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(files)}


def _listed(found: list[tuple[str, int, str]]) -> list[str]:
    return [f"{path}:{line}: {text[:90]}" for path, line, text in found]


def test_no_docstring_begins_in_the_middle_of_a_thought(sources):
    found = [(path, *one) for path, text in sources.items() for one in openings(text, OPENINGS)]
    assert not _listed(found), "begin with a sentence or a verb phrase that stands alone"


def test_few_docstrings_are_subordinate_clauses(sources):
    found = [(path, *one) for path, text in sources.items() for one in openings(text, FRAGMENTS)]
    assert len(found) <= MAX_FRAGMENTS, "\n".join(_listed(found))


def test_no_text_uses_a_private_phrase(sources):
    found = [(path, *one) for path, text in sources.items() for one in phrases(text)]
    assert not _listed(found), "rewrite the sentence with the usual words: continue, report, compare with"


@pytest.mark.parametrize(
    "source",
    [
        "x = f'the run goes\\n on with {x}'",
        "x = 1  # each engine is told\n",
        "# the others go\n# on\nx = 1\n",
        "def f():\n    '''Merge those\n    that match.'''\n",
    ],
)
def test_a_phrase_is_found_over_line_ends_in_every_kind_of_text(source):
    assert [text for _, text in phrases(source)]


def test_words_that_only_look_like_a_phrase_pass():
    assert not list(phrases("# cargo on a ship, and what it told; goes online\n"))


def test_openings_are_found_in_every_kind_of_docstring():
    source = '"""It runs."""\nclass A:\n    """Of B."""\n    x: int = 0\n    """Those of C."""\n'
    assert [line for line, _ in openings(source, OPENINGS)] == [1, 3, 5]
    assert not openings('"""Iterate over items."""', OPENINGS)
