"""docs/flags.md, plugins.md and catalog.md say what the declarations say."""

from pathlib import Path

import pytest

from slime.arguments.all_flags import all_specs
from slime.cli import docs
from slime.plugins import PLUGIN_POINTS

FOLDER = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", docs.pages())
def test_page_is_current(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == docs.pages()[name], (
        "run `slime docs` and commit the result"
    )


def test_every_flag_and_plug_in_has_a_row():
    pages = docs.pages()
    assert [s.option for s in all_specs().values() if f"| `{s.option}` |" not in pages["flags.md"]] == []
    assert [p.option for p in PLUGIN_POINTS if f"| `{p.option}` |" not in pages["plugins.md"]] == []


def test_command_writes_the_pages(tmp_path):
    assert docs.main([str(tmp_path)]) == 0
    assert (tmp_path / "flags.md").read_text(encoding="utf-8") == docs.pages()["flags.md"]
