"""docs/api.md against the code: every name that it lists can be imported, and its examples are Python."""

import ast
import importlib
import re

import pytest
from docs_world import ROOT

from slime.arguments.all_flags import all_specs

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| `(slime[\w.]*)` \| (.+) \|$", TEXT, re.MULTILINE)
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_page_has_a_table_and_examples():
    assert len(TABLE) >= 5 and len(BLOCKS) >= 3


@pytest.mark.parametrize(("module", "names"), TABLE, ids=[module for module, _ in TABLE])
def test_names_of_the_table_are_where_it_says(module, names):
    found = importlib.import_module(module)
    listed = re.findall(r"`(\w+)`", names)
    assert listed and [name for name in listed if not hasattr(found, name)] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_import_what_there_is_and_use_flags_that_exist(block):
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime"):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "train":
            given = {word.arg for word in node.keywords}
            assert given <= {*all_specs(), "model", "reward", "data"}


def test_methods_of_a_result_that_are_shown_exist():
    from slime.api import Result

    shown = set(re.findall(r"\bresult\.(\w+)", TEXT))
    fields = set(getattr(Result, "__dataclass_fields__", {})) | set(dir(Result))
    assert shown and shown <= fields
