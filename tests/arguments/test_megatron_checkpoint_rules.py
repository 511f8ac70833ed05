"""`--ref-load DIR_torch_dist` and its like: what a checkpoint of Megatron's is taken for."""

import json

import pytest
from argument_helpers import parse

from slime.utils.models.model_config import quantization_config


def make_folder(path, *iterations: str, kind: str = "torch_dist") -> str:
    """A folder as Megatron leaves it, as far as flags look."""
    for name in iterations:
        (path / name).mkdir(parents=True)
        (path / name / "metadata.json").write_text(json.dumps({"sharded_backend": kind}))
        (path / name / ".metadata").write_text("")
    last = iterations[-1]
    number = "release" if last == "release" else str(int(last.removeprefix("iter_")))
    (path / "latest_checkpointed_iteration.txt").write_text(number)
    return str(path)


def make_model(path, model_type: str = "qwen3") -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(path)


def test_the_reference_is_also_where_the_policy_starts(tmp_path):
    folder = make_folder(tmp_path / "a_torch_dist", "release")
    args = parse("--use-kl-loss", "--ref-load", folder)
    assert args.ref_load == args.start_from == f"{folder}/release"
    args = parse("--ref-load", folder)
    assert (args.ref_load, args.start_from) == (None, f"{folder}/release")
    assert parse().start_from == "owner/model"
    with pytest.raises(
        ValueError, match=r"--lora-sync adapter with first weights of .*use --lora-sync merged"
    ):
        parse("--ref-load", folder, "--lora-rank", "4", "--lora-sync", "adapter")


def test_what_load_names_comes_first_and_only_its_weights(tmp_path):
    reference = make_folder(tmp_path / "a_torch_dist", "release")
    trained = make_folder(tmp_path / "run", "iter_0000005", "iter_0000010")
    args = parse("--use-kl-loss", "--ref-load", reference, "--load", trained, "--save", trained)
    assert (args.load, args.start_from) == (None, f"{trained}/iter_0000010")
    assert args.ref_load == f"{reference}/release"
    assert any("optimizer, schedule and place in the data start anew" in text for text in args.warnings)
    args = parse("--load", trained, "--ckpt-step", "5")
    assert args.start_from == f"{trained}/iter_0000005"
    (tmp_path / "run" / "step_0000003").mkdir()
    assert parse("--load", trained, "--save", trained).load == trained  # a run of ours went on from there


def test_an_iteration_of_the_reference_is_chosen(tmp_path):
    folder = make_folder(tmp_path / "run", "iter_0000005", "iter_0000010")
    args = parse("--use-kl-loss", "--ref-load", folder, "--ref-ckpt-step", "5")
    assert args.ref_load == f"{folder}/iter_0000005"
    with pytest.raises(ValueError, match=r"--ref-load is .*, which has no folder iter_0000007"):
        parse("--use-kl-loss", "--ref-load", folder, "--ref-ckpt-step", "7")


@pytest.mark.parametrize(
    ("kind", "model_type", "why"),
    [("zarr", "qwen3", "format zarr"), ("torch_dist", "gpt2", "read for llama, .* gpt2")],
)
def test_a_converted_one_that_is_not_read_leaves_hf_checkpoint_its_place(tmp_path, kind, model_type, why):
    model = make_model(tmp_path / "model", model_type)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    folder = make_folder(tmp_path / "a_torch_dist", "release", kind=kind)
    if kind == "zarr":
        (tmp_path / "a_torch_dist" / "release" / ".metadata").unlink()
    args = parse("--ref-load", folder, "--use-kl-loss", hf_checkpoint=model)
    assert args.ref_load == args.start_from == model
    assert any(folder in text and "are used instead" in text for text in args.warnings)
    trained = make_folder(tmp_path / "run", "iter_0000002", kind=kind)
    if kind == "zarr":
        (tmp_path / "run" / "iter_0000002" / ".metadata").unlink()
    with pytest.raises(ValueError, match=f"--load is {trained}, a checkpoint in Megatron's format, .*{why}"):
        parse("--load", trained, hf_checkpoint=model)


def test_a_model_given_as_reference_without_a_kl_is_where_the_policy_starts(tmp_path):
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other")
    args = parse("--ref-load", model, hf_checkpoint=model)
    assert (args.ref_load, args.start_from) == (None, model)
    assert "--ref-load is" in args.warnings[0] and "there is no KL to a reference" in args.warnings[0]
    args = parse("--ref-load", other, hf_checkpoint=model)
    assert (args.ref_load, args.start_from) == (None, other)
    args = parse("--ref-load", other, "--use-kl-loss", hf_checkpoint=model)
    assert (args.ref_load, args.start_from) == (other, model)


def test_engines_start_from_fp8_weights_and_the_policy_from_its_reference(tmp_path):
    small, model = make_model(tmp_path / "fp8"), make_model(tmp_path / "model")
    config = {"model_type": "qwen3", "quantization_config": quantization_config((128, 128))}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    args = parse("--ref-load", model, "--use-kl-loss", hf_checkpoint=small)
    assert (args.ref_load, args.start_from, args.fp8_rounding) == (model, model, "nearest")


def test_a_model_may_be_loaded_as_a_checkpoint_is(tmp_path):
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other")
    args = parse("--load", other, hf_checkpoint=model)
    assert (args.load, args.start_from) == (None, other)
    assert any(f"--load {other}: the weights of this model are read" in text for text in args.warnings)
