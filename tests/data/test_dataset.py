"""Datasets: the order of an epoch, the length filter, and what an empty one says."""

import subprocess
import sys

import pytest
from rollout_helpers import write_prompts
from tiny_model import make_tiny_tokenizer

from slime.data.dataset import Dataset, epoch_order, filter_long_prompt, read_file
from slime.utils.types import Sample


def test_every_epoch_is_a_permutation_of_its_own():
    orders = [epoch_order(42, epoch, 100) for epoch in range(5)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert epoch_order(42, 3, 100) != epoch_order(43, 3, 100)


def test_the_order_is_the_same_in_another_process():
    code = "from slime.data.dataset import epoch_order; print(epoch_order(7, 2, 20))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{epoch_order(7, 2, 20)}\n"}


def test_positions_are_spread_evenly():
    firsts = [epoch_order(seed, 0, 10)[0] for seed in range(2000)]
    assert all(140 <= firsts.count(i) <= 260 for i in range(10))


def test_shuffling_does_not_depend_on_epochs_before(tmp_path):
    path = str(write_prompts(tmp_path / "p.jsonl", 30))
    one, two = Dataset(path, seed=5), Dataset(path, seed=5)
    for epoch in range(3):
        one.shuffle(epoch)
    two.shuffle(2)
    assert [s.prompt for s in one.samples] == [s.prompt for s in two.samples]


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path):
    dataset = Dataset(str(write_prompts(tmp_path / "p.jsonl", 3)))
    assert [s.prompt for s in dataset.samples] == ["q0", "q1", "q2"] == [dataset[i].prompt for i in range(3)]


def test_long_prompts_are_left_out_in_order():
    samples = [Sample(prompt="x" * n) for n in (3, 9, 1, 4)] + [
        Sample(prompt=[{"role": "user", "content": "y" * 50}])
    ]
    kept = filter_long_prompt(samples, make_tiny_tokenizer(), None, 4, batch_size=2)
    assert [s.prompt for s in kept] == ["xxx", "x", "xxxx"]


def test_a_dataset_that_is_empty_after_filtering_names_flag_and_counts(tmp_path):
    path = str(write_prompts(tmp_path / "p.jsonl", 12))
    with pytest.raises(
        ValueError, match=r"all 12 prompts are longer than --rollout-max-prompt-len 1 tokens, 0 are left"
    ):
        Dataset(path, make_tiny_tokenizer(), None, 1)


def test_an_empty_file_or_slice_is_an_error(tmp_path):
    path = str(write_prompts(tmp_path / "p.jsonl", 2))
    with pytest.raises(ValueError, match=r"--prompt-data .*: no rows"):
        Dataset(path + "@[5:]")


def test_rows_are_named_in_errors(tmp_path):
    path = str(write_prompts(tmp_path / "p.jsonl", 2))
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1: no column 'question'"):
        Dataset(path, prompt_key="question")


def test_read_file_is_importable_beside_dataset(tmp_path):
    assert [row["input"] for row in read_file(str(write_prompts(tmp_path / "p.jsonl", 2)))] == ["q0", "q1"]
