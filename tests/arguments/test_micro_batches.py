"""Micro-batches are filled by tokens unless somebody asks for a number of samples; runs keep theirs."""

import json

import pytest
from argument_helpers import parse

from slime.arguments.groups import micro_batches
from slime.arguments.groups.micro_batches import ON_CPU, tokens_that_fit
from slime.utils.files.run_file import RUN_FILE, close_run_file, open_run_file, read_run

GIB = 1 << 30
QWEN_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
OLD = {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None, "micro_batch_size": 1}


def test_micro_batches_are_filled_by_tokens_by_default():
    args = parse()
    assert args.use_dynamic_batch_size is True
    assert args.max_tokens_per_gpu == ON_CPU
    assert "--no-use-dynamic-batch-size" in args.sources["use_dynamic_batch_size"]
    assert "CPU" in args.sources["max_tokens_per_gpu"]


def test_a_number_of_samples_or_the_no_form_turns_it_off():
    assert not parse(micro_batch_size=4).use_dynamic_batch_size
    off = parse("--no-use-dynamic-batch-size")
    assert off.use_dynamic_batch_size is False and off.max_tokens_per_gpu is None


def test_a_token_limit_is_taken_as_given_and_derived_where_it_is_left_out():
    assert parse(max_tokens_per_gpu=777).max_tokens_per_gpu == 777
    assert parse("--use-dynamic-batch-size").max_tokens_per_gpu == ON_CPU
    both = parse("--use-dynamic-batch-size", micro_batch_size=4)
    assert both.use_dynamic_batch_size and any("--micro-batch-size is 4" in w for w in both.warnings)


@pytest.mark.parametrize(
    ("gib", "ranks", "recompute", "expected"),
    [(139, 1, "none", 16384), (80, 1, "none", 16384), (24, 1, "none", 3072), (24, 1, "full", 16384)],
)
def test_the_limit_of_a_gpu_follows_from_its_memory_and_the_model(gib, ranks, recompute, expected):
    found = tokens_that_fit(
        QWEN_06B, gib * GIB, item_bytes=2, ranks=ranks, copies_over=ranks, recompute=recompute
    )
    assert found == expected


def test_a_model_that_hardly_fits_gets_the_least_limit_and_more_ranks_raise_it():
    large = QWEN_06B | {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}
    one = tokens_that_fit(large, 80 * GIB, item_bytes=2, ranks=1, copies_over=1, recompute="full")
    eight = tokens_that_fit(large, 80 * GIB, item_bytes=2, ranks=8, copies_over=8, recompute="full")
    assert one == micro_batches.LEAST and eight == micro_batches.MOST


def test_on_a_gpu_the_limit_and_its_reason_are_settings_like_any_other(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_06B))
    monkeypatch.setattr(micro_batches, "gpu_bytes", lambda: 24 * GIB)
    args = parse(hf_checkpoint=str(tmp_path), dtype="bfloat16")
    assert args.max_tokens_per_gpu == 3072
    assert "24 GiB" in args.sources["max_tokens_per_gpu"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_another_kind"}))
    args = parse(hf_checkpoint=str(tmp_path), dtype="bfloat16")
    assert args.max_tokens_per_gpu == ON_CPU
    assert "config" in args.sources["max_tokens_per_gpu"]


# -- resumed runs --------------------------------------------------------------------------------------------


def stop(folder, args, *, before_this_change=False):
    """Leave the folder of a run that was interrupted, as `open_run` and `close_run` do."""
    settings = {name: {"value": v, "source": "default"} for name, v in args.to_dict().items()}
    if before_this_change:
        settings |= {name: {"value": value, "source": "default"} for name, value in OLD.items()}
    folder.mkdir(parents=True, exist_ok=True)
    open_run_file(folder, settings, args.save, None, None)
    close_run_file(folder, KeyboardInterrupt())
    (folder / "metrics.jsonl").write_text("{}\n")


def packing(args):
    return {name: getattr(args, name) for name in OLD}


def test_a_run_folder_from_before_the_default_resumes_with_one_sample_at_a_time(tmp_path):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")}
    stop(tmp_path / "run", parse(**flags), before_this_change=True)
    again = parse(**flags)
    assert again.load == flags["save"], "the same command goes on with the run of its folder"
    assert packing(again) == OLD
    assert "run" in again.sources["use_dynamic_batch_size"]
    loaded = parse(**flags, load=flags["save"])
    assert packing(loaded) == OLD


def test_a_resumed_run_keeps_the_limit_that_another_device_gave_it(tmp_path, monkeypatch):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")}
    first = parse(**flags)
    stop(tmp_path / "run", first)
    monkeypatch.setattr(micro_batches, "ON_CPU", 99)
    again = parse(**flags)
    assert again.load == flags["save"]
    assert packing(again) == packing(first)
    assert parse(**flags, load=flags["save"]).max_tokens_per_gpu == first.max_tokens_per_gpu
    other = parse(**flags | {"run_dir": str(tmp_path / "other"), "save": str(tmp_path / "o")})
    assert other.max_tokens_per_gpu == 99


def test_what_is_given_wins_over_what_the_run_had(tmp_path):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")}
    stop(tmp_path / "run", parse(**flags), before_this_change=True)
    again = parse(**flags, load=flags["save"], use_dynamic_batch_size=True)
    assert again.use_dynamic_batch_size and again.max_tokens_per_gpu == ON_CPU
    again = parse(**flags, load=flags["save"], micro_batch_size=3)
    assert (again.use_dynamic_batch_size, again.micro_batch_size) == (False, 3)


def test_a_changed_setting_still_starts_no_resume(tmp_path):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")}
    stop(tmp_path / "run", parse(**flags), before_this_change=True)
    assert parse(**flags, lr=0.5).load is None


def test_an_automatic_folder_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = parse(save="save")
    stop(tmp_path / first.run_dir, first, before_this_change=True)
    again = parse(save="save")
    assert (again.run_dir, again.load) == (first.run_dir, str(tmp_path / "save"))
    assert packing(again) == OLD
    assert read_run(tmp_path / first.run_dir) is not None and (tmp_path / first.run_dir / RUN_FILE).is_file()
