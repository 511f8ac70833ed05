"""Engines in FP8: from an FP8 folder, or from a 16-bit checkpoint by one flag."""

import json
import sys

import pytest
from argument_helpers import parse


@pytest.fixture
def fp8_folder(tmp_path):
    folder = tmp_path / "model-fp8"
    folder.mkdir()
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_start_from_fp8_weights_rounds_stochastically_and_is_told_what_it_means(fp8_folder):
    args = parse(hf_checkpoint=fp8_folder)
    assert args.fp8_rounding == "stochastic" and "FP8" in args.sources["fp8_rounding"]
    (warning,) = args.warnings
    assert "starts from values of FP8" in warning and "--rollout-quantization fp8" in warning
    (warning,) = parse("--fp8-rounding", "nearest", hf_checkpoint=fp8_folder).warnings
    assert "do not reach the engines" in warning


def test_a_16_bit_checkpoint_is_served_in_fp8_by_one_flag():
    args = parse("--rollout-quantization", "fp8")
    assert (args.fp8_rounding, args.logprob_diff_threshold, args.warnings) == ("nearest", 0.2, ())
    assert parse("--rollout-quantization", "fp8", "--fp8-rounding", "stochastic").fp8_rounding == "stochastic"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rollout-external-engine-addrs", "127.0.0.1:1"), "choose their own format"),
        (("--debug-rollout-only",), "pushes nothing to engines"),
        (("--lora-rank", "4", "--lora-sync", "adapter"), "use --lora-sync merged"),
    ],
)
def test_fp8_from_a_16_bit_checkpoint_is_refused_where_no_push_brings_it(words, message):
    with pytest.raises(ValueError, match=message):
        parse("--rollout-quantization", "fp8", *words, rollout_num_gpus=None)


def test_an_fp8_folder_needs_no_flag_and_a_rounding_needs_fp8(fp8_folder):
    with pytest.raises(ValueError, match="contains FP8 weights already"):
        parse("--rollout-quantization", "fp8", hf_checkpoint=fp8_folder)
    with pytest.raises(ValueError, match="the engines hold no FP8 weights"):
        parse("--fp8-rounding", "nearest")


def test_int4_needs_no_other_flag_with_the_embedded_engine_and_files_with_sglang(tmp_path):
    args = parse("--rollout-quantization", "int4")
    assert (
        args.rollout_quantization == "int4" and args.logprob_diff_threshold == parse().logprob_diff_threshold
    )
    sglang = (
        "--rollout-engine",
        "sglang",
        "--sglang-python",
        sys.executable,
        "--rollout-quantization",
        "int4",
    )
    with pytest.raises(ValueError, match="use --update-weight-transport disk"):
        parse(*sglang)
    disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path))
    assert parse(*sglang, *disk).update_weight_transport == "disk"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fp8-training",), "remove --fp8-training"),
        (("--dtype", "float16"), "need --dtype bfloat16 or float32"),
        (("--lora-rank", "4"), "remove --lora-rank"),
        (("--fp8-rounding", "nearest"), "the engines hold no FP8 weights"),
        (("--train-backend", "megatron"), "only --train-backend fsdp rounds weights"),
    ],
)
def test_int4_is_refused_where_the_trainer_cannot_round_as_the_engine_does(words, message):
    with pytest.raises(ValueError, match=message):
        parse("--rollout-quantization", "int4", *words)


def test_int4_of_an_fp8_folder_is_refused(fp8_folder):
    with pytest.raises(ValueError, match="contains FP8 weights already"):
        parse("--rollout-quantization", "int4", hf_checkpoint=fp8_folder)
