"""A model's config.json: damaged ones are named, whoever reads them first."""

import pytest

from slime.arguments import parse_args
from slime.utils.models.model_config import block_size_of, read_config


@pytest.mark.parametrize("text", ["{", "[]", "null", '"text"', "\x00"])
def test_a_damaged_one_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (cannot be read|holds a)"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_so_it_is_where_arguments_are_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    words = "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 1 --rollout-max-response-len 8"
    with pytest.raises(ValueError, match=r"config\.json"):
        parse_args(["--hf-checkpoint", str(tmp_path), *words.split(), "--disable-rollout-global-dataset"])


def test_a_folder_without_one_is_empty(tmp_path):
    assert read_config(tmp_path) == {} and block_size_of(tmp_path) is None


@pytest.mark.parametrize(
    "how", ["null", "[]", '{"quant_method": "gptq"}', '{"weight_block_size": [128, 128]}']
)
def test_other_quantizations_are_no_fp8_blocks(tmp_path, how):
    (tmp_path / "config.json").write_text(f'{{"quantization_config": {how}}}')
    assert block_size_of(tmp_path) is None
