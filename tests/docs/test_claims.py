"""What pages claim of the code is compared with the code: lists, and what is said to be missing."""

import re

import pytest
from docs_world import ROOT

from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import DATASET_FORMATS
from slime.catalog.engines import ENGINES
from slime.catalog.optimizers import OPTIMIZERS
from slime.catalog.transports import TRANSPORTS
from slime.catalog.vision import VISION_FAMILIES

DOCS = ROOT / "docs"
NUMBERS = [
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
]


def section(page, title):
    """The text of a page from a heading to the next one of its kind."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {title!r}"
    return found[2]


def sources():
    """All Python files of the package, as one text for each."""
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "slime").rglob("*.py")}


def test_the_rollout_page_names_every_kind_of_prompt_file():
    text = section("rollout.md", "Prompt files")
    missing = [kind for kind in DATASET_FORMATS if f"`{kind}" not in text]
    assert not missing


def test_the_megatron_page_and_the_status_page_name_every_family():
    families, text = BACKENDS["megatron"].families, section("megatron.md", "Families")
    assert [name for name in families if f"`{name}`" not in text] == []
    said = re.search(r"\| (\w+) model families", (DOCS / "status.md").read_text(encoding="utf-8"))
    assert said and NUMBERS.index(said[1]) == len(families)


def _names(pattern: str) -> bool:
    return any(re.search(pattern, text) for text in sources().values())


# What comparison.md says is missing here -> whether the code has it after all.
MISSING = {
    "larger models shown": lambda: False,  # a matter of runs, not of code
    "runs on several GPUs shown": lambda: False,  # the same
    "curves of real tasks such as GSM8K, AIME or SWE": lambda: False,  # the same
    "vision-language models with Megatron, or long runs of them on a GPU": lambda: any(
        name in BACKENDS["megatron"].families for name in VISION_FAMILIES
    ),
    "vLLM": lambda: "vllm" in ENGINES,
    "an engine over several GPU machines shown": lambda: False,  # a matter of runs
    "several adapters at once": lambda: _names(r"multi_lora|max_adapters"),
    "RDMA": lambda: any("rdma" in name.lower() for name in TRANSPORTS),
    "published times of weight sync between machines": lambda: False,
    "a Tinker-compatible training service": lambda: _names(r"(?i)tinker"),
    "Muon on Megatron": lambda: "megatron" in OPTIMIZERS["muon"].trainers,
    "KTO, ORPO and their like": lambda: _names(r"['\"](kto|orpo|simpo)(_loss)?['\"]"),
    "runs on AMD, Ascend or TPU shown": lambda: False,  # a matter of runs
    "QLoRA, adapters on a model in 4 bits": lambda: _names(r"(?i)qlora|['\"]nf4['\"]"),
    "MXFP8 or NVFP4": lambda: _names(r"(?i)['\"](mxfp8|nvfp4)['\"]"),
    "draft models trained during the run": lambda: _names(r"(?i)(eagle3?|draft)_loss|train_draft"),
    # Both are refused by name.
    "audio, and video files": lambda: not _names(r'kind in \((_VIDEO|"video"), "audio"\)'),
}


def test_what_the_comparison_calls_missing_is_missing():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    listed = text[text.index("this repository has not") :].partition("\n## ")[0]
    claims = re.findall(r"^- ([^:]+):", listed, re.MULTILINE)
    assert claims == list(MISSING)
    assert [claim for claim in claims if MISSING[claim]()] == []


def test_the_comparison_names_every_vision_family_that_trains():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8").lower()
    plain = re.sub(r"[^a-z0-9]", "", text)
    assert [name for name in VISION_FAMILIES if re.sub(r"[^a-z0-9]", "", name) not in plain] == []


# Sentences that were true once -> what in the repository makes them untrue.
OUTDATED = [
    ("engines.md", "no CUDA graphs", "slime/engines/embedded/graphs.py"),
    ("megatron.md", "experts run one after the other:", "slime/backends/megatron/modules/grouped_experts.py"),
    ("topology.md", "a lost trainer rank ends the run", "slime/cluster/restart"),
    ("architecture.md", "only compatibility", "slime/moved.py"),
    ("../README.md", "three hops", "slime/loop.py"),
    ("../slime/moved.py", "only compatibility", "slime/moved.py"),
]


@pytest.mark.parametrize(("page", "sentence", "because"), OUTDATED)
def test_a_page_does_not_say_what_the_code_has_outgrown(page, sentence, because):
    assert (ROOT / because).exists()
    assert sentence not in (DOCS / page).read_text(encoding="utf-8")
