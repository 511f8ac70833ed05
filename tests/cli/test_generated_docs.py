"""Generated pages say what the declarations say, and the glossary has every metric that is logged."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from source_trees import nodes_of

from slime.arguments.all_flags import all_specs
from slime.arguments.core.flag import convert
from slime.catalog.families import SGLANG_VERSION, VERIFIED, family_rows
from slime.catalog.metrics import METRICS, find_metric
from slime.cli import docs
from slime.plugins import PLUGIN_POINTS
from slime.step.step_report import PER_SAMPLE_METRICS, PER_TOKEN_METRICS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", docs.pages())
def test_page_is_current(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == docs.pages()[name], (
        "run `slime docs` and commit the result"
    )


def test_every_family_has_a_row_that_says_what_trains_and_serves_it():
    rows = {name: cells for name, *cells in family_rows()}
    assert {name for names in VERIFIED.values() for name in names} <= {*rows}
    assert rows["glm_moe_dsa"] == ["padded", "yes", "-", "yes", "-", "CPU"]
    assert rows["qwen3_moe"] == ["packed", "yes", "tested", "yes", "-", "H200: both trainers"]
    assert rows["qwen3_next"][:3] == ["packed, states by document", "yes", "-"]
    assert rows["mimo"] == ["-", "yes", "-", "yes", "-", "CPU"]
    assert rows["qwen2_5_vl"] == ["packed", "-", "tested", "yes", "yes", "CPU"]


@pytest.mark.sglang
def test_sglang_has_the_architectures_that_the_table_says():
    from importlib.metadata import version
    from importlib.util import find_spec

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

    if version("sglang") != SGLANG_VERSION:
        pytest.skip(f"the table is of SGLang {SGLANG_VERSION}")
    folder = Path(find_spec("sglang").origin).parent / "srt/models"
    classes = r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)"
    known = {
        word
        for file in folder.glob("*.py")
        for found in re.findall(classes, file.read_text(), re.MULTILINE)
        for word in re.findall(r"\w+", found)
    }
    for name, *cells in family_rows():
        if name in TEXT or name in IMAGES:
            assert (cells[3] == "yes") == bool(known & {TEXT.get(name), IMAGES.get(name)}), name


def test_every_flag_and_plug_in_has_an_entry():
    pages = docs.pages()
    tables = pages["flags.md"].partition("\n## Essentials")[2].partition("\n## ")[2]
    assert [s.option for s in all_specs().values() if f"\n| `{s.option}`" not in tables] == []
    assert [p.option for p in PLUGIN_POINTS if f"\n- `{p.option}`, " not in pages["plugins.md"]] == []


# Flags of released versions by version: the lists of these may shrink, and never grow.
RELEASED = {"0.1.0": 261, "0.2.0": 38, "0.3.0": 29}


def test_every_flag_names_the_version_in_which_it_appeared():
    since = docs.flags_since()
    assert set(since) == set(all_specs()), "a new flag goes into slime/arguments/since.yaml"
    count = Counter(version.removesuffix("†") for version in since.values())
    grown = {v: n for v, n in count.items() if n > RELEASED.get(v, n)}
    assert not grown, f"released already; name the coming version in slime/arguments/since.yaml: {grown}"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert {*count} <= {*re.findall(r"^## ([\d.]+)", changelog, re.MULTILINE)}


def test_every_group_of_flags_belongs_to_one_task():
    groups = {spec.group for spec in all_specs().values()}
    named = [name for names in docs.TASKS.values() for name in names]
    assert [g for g in groups if sum(g.startswith(name) for name in named) != 1] == []


def test_essential_flags_have_examples_that_are_values():
    for name, value in docs.ESSENTIALS.items():
        spec = all_specs()[name]
        assert (spec.kind is bool) == (value == ""), name
        for word in value.split():
            convert(spec, word)


def test_command_writes_the_pages(tmp_path):
    assert docs.main([str(tmp_path)]) == 0
    assert (tmp_path / "flags.md").read_text(encoding="utf-8") == docs.pages()["flags.md"]


FILLED_IN = "\0"  # stands for what an f-string puts into a name


def written_names() -> set[str]:
    """Names of metrics in the source."""
    found = set()
    for path in (ROOT / "slime").rglob("*.py"):
        if path.parent.name in ("cli", "catalog"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else FILLED_IN for p in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    name = re.compile(r"(rollout|train|perf|eval|passrate)/[\0\w/.@-]*[\0a-z0-9]")
    return set(filter(name.fullmatch, found))


def has_row(written: str) -> bool:
    """A name, a name with parts filled in, or the beginning of names."""
    template = re.compile(re.escape(written).replace(FILLED_IN, ".*") + "(/<.*)?")
    return bool(find_metric(written)) or any(
        template.fullmatch(row.name) for rows in METRICS.values() for row in rows
    )


def test_every_metric_in_the_source_is_in_the_glossary():
    names = written_names() | {f"rollout/{key}" for key in (*PER_TOKEN_METRICS, *PER_SAMPLE_METRICS)}
    assert len(names) > 40
    unknown = {name for name in names if not has_row(name)}
    assert not unknown, f"add rows to slime/catalog/metrics.py for {unknown}"


def test_metrics_are_found_by_the_most_exact_row():
    assert find_metric("rollout/response_len/mean").name == "rollout/response_len/<stat>"
    assert find_metric("eval/heldout/response_len/mean").name == "rollout/response_len/<stat>"
    assert find_metric("eval/heldout-pass@4").name == "eval/<dataset>-pass@<k>"
    assert find_metric("rollout/never_heard_of") is None
    assert find_metric("eval/heldout/never_heard_of/x") is None
    assert all(row.what for rows in METRICS.values() for row in rows)
