"""The data source: epochs wrap, the buffer goes first, and its state is all of it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rollout_helpers import make_args, make_source

from slime.rollout.data_source import RolloutDataSource, pop_first, take_groups
from slime.utils.plugin_errors import PluginError
from slime.utils.types import RewardFailure, Sample


def prompts_of(groups):
    return [group[0].prompt for group in groups]


def test_twelve_groups_from_five_prompts_are_twelve(tmp_path):
    source = make_source(make_args(tmp_path, prompts=5))
    groups = source.get_samples(12)
    assert len(groups) == 12
    assert prompts_of(groups) == [f"q{i % 5}" for i in range(12)]
    assert source.epoch_id == 2 and source.sample_offset == 2


def test_each_shuffled_epoch_visits_every_prompt_once(tmp_path):
    source = make_source(make_args(tmp_path, None, "--rollout-shuffle", prompts=5))
    groups = source.get_samples(15)
    epochs = [prompts_of(groups[i : i + 5]) for i in (0, 5, 10)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(5)] for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


def test_samples_of_a_group_share_nothing_that_changes(tmp_path):
    source = make_source(make_args(tmp_path, prompts=1))
    source.dataset[0].metadata = {"seen": [], "by": {"x": [1]}}
    first, second = source.get_samples(1)[0]
    first.metadata["seen"].append(1)
    first.metadata["by"]["x"].append(2)
    first.tokens.append(3)
    first.spec_info.spec_verify_ct = 4
    assert second.metadata == source.dataset[0].metadata == {"seen": [], "by": {"x": [1]}}
    assert second.tokens == [] and second.spec_info.spec_verify_ct == 0


def test_indices_are_unique_and_groups_are_numbered(tmp_path):
    source = make_source(make_args(tmp_path, prompts=3))
    groups = source.get_samples(2) + source.get_samples(3)
    assert [s.index for group in groups for s in group] == list(range(10))
    assert [[s.group_index for s in group] for group in groups] == [[i, i] for i in range(5)]


def test_samples_of_a_group_do_not_share_state(tmp_path):
    source = make_source(make_args(tmp_path, prompts=3))
    (a, b), *_ = source.get_samples(1)
    a.tokens.append(1)
    a.metadata["x"] = 1
    assert b.tokens == [] and b.metadata == {}
    assert source.dataset[0].metadata == {}


def test_the_buffer_goes_out_before_the_dataset(tmp_path):
    source = make_source(make_args(tmp_path, prompts=8))
    first = source.get_samples(3)
    source.add_samples(first[:2])
    assert prompts_of(source.get_samples(4)) == ["q0", "q1", "q3", "q4"]
    assert source.get_buffer_length() == 0


def test_a_buffer_filter_decides_what_leaves_the_buffer(tmp_path):
    source = make_source(
        make_args(tmp_path, None, "--buffer-filter-path", "rollout_plugins.newest_first", prompts=8)
    )
    source.add_samples(source.get_samples(3))
    assert prompts_of(source.get_samples(2)) == ["q2", "q1"]


@pytest.mark.parametrize("name", ["leaves_in_buffer", "returns_twice"])
def test_a_buffer_filter_that_would_train_a_group_twice_is_named(tmp_path, name):
    source = make_source(make_args(tmp_path, None, "--buffer-filter-path", f"{__name__}.{name}", prompts=8))
    source.add_samples(source.get_samples(3))
    with pytest.raises(PluginError, match=f"--buffer-filter-path .*{name}.*would be trained again"):
        source.get_samples(2)


def leaves_in_buffer(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def returns_twice(args, rollout_id, buffer, num_samples):
    return [buffer.pop(0)] * num_samples


def test_pop_first_takes_the_oldest_out():
    buffer = [["a"], ["b"], ["c"]]
    assert pop_first(None, None, buffer, 2) == [["a"], ["b"]] and buffer == [["c"]]


def test_a_group_of_the_wrong_size_is_refused(tmp_path):
    source = make_source(make_args(tmp_path))
    with pytest.raises(ValueError, match="--n-samples-per-prompt 2"):
        source.add_samples([[Sample(index=0)]])


def test_a_source_without_buffer_says_so(tmp_path):
    with pytest.raises(NotImplementedError, match="RolloutDataSourceWithBuffer"):
        RolloutDataSource(make_args(tmp_path)).add_samples([])


def test_without_a_dataset_samples_are_empty_but_numbered(tmp_path):
    source = make_source(make_args(tmp_path, None, "--disable-rollout-global-dataset"))
    [group] = source.get_samples(1)
    assert [s.index for s in group] == [0, 1] and group[0].prompt == ""


def fill(source):
    """A cursor in the second epoch and a buffer with a partial, a finished, a failed and a fan-out group."""
    groups = source.get_samples(7)
    groups[0][0].tokens, groups[0][0].response_length = [1, 2, 3], 1
    groups[0][0].status = Sample.Status.ABORTED
    groups[0][0].version_spans = [("run:1", 0, 1)]
    for sample in groups[1]:
        sample.status, sample.reward = Sample.Status.COMPLETED, 0.5
    groups[2][0].reward_failure = RewardFailure("invalid", "no answer")
    groups[3][1] = [
        Sample(index=7, group_index=3, rollout_id=7),
        Sample(index=7, group_index=3, rollout_id=7),
    ]
    source.add_samples(groups[:4])
    source.settle(groups[4:], "trained")
    source.update_metadata({"level": 3})


def test_the_state_survives_a_round_trip_through_a_file(tmp_path):
    args = make_args(tmp_path, None, "--rollout-shuffle", prompts=5)
    one, two = make_source(args), make_source(args)
    fill(one)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    two.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert two.state_dict() == one.state_dict()
    assert two.get_metadata() == {"level": 3} and two.journal.counts == one.journal.counts
    assert two.get_samples(20) == one.get_samples(20)


def test_the_state_does_not_change_with_the_samples_it_was_taken_from(tmp_path):
    source = make_source(make_args(tmp_path))
    source.add_samples(source.get_samples(1))
    state = source.state_dict()
    source.buffer[0][0].tokens.append(5)
    source.buffer[0][0].metadata["later"] = True
    assert state["buffer"][0][0]["tokens"] == [] and state["buffer"][0][0]["metadata"] == {}


def test_the_state_that_another_release_saved_is_loaded(tmp_path):
    args = make_args(tmp_path)
    source = make_source(args)
    fill(source)
    args.load = str(tmp_path)
    (tmp_path / "rollout").mkdir()
    torch.save(source.state_dict(), tmp_path / "rollout" / "global_dataset_state_dict_3.pt")
    resumed = make_source(args)
    resumed.load(3)
    assert resumed.state_dict() == source.state_dict()


def test_a_state_of_a_newer_format_is_refused(tmp_path):
    source = make_source(make_args(tmp_path))
    with pytest.raises(ValueError, match="format 99"):
        source.load_state_dict({**source.state_dict(), "format": 99})


def test_the_order_of_prompts_is_the_same_in_another_process(tmp_path):
    args = make_args(tmp_path, None, "--rollout-shuffle", prompts=9)
    code = (
        "import json, pathlib; from rollout_helpers import make_args, make_source;"
        f"source = make_source(make_args(pathlib.Path({str(tmp_path)!r}), None, '--rollout-shuffle'));"
        "print(json.dumps([group[0].prompt for group in source.get_samples(25)]))"
    )
    environment = {"PYTHONPATH": ".:tests/support", "PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(other.stdout.splitlines()[-1]) == prompts_of(make_source(args).get_samples(25))


class BrokenSource:
    def get_samples(self, num_samples):
        return {}["gold"]


def test_a_mistake_in_a_user_s_own_source_is_named_with_its_place():
    args = SimpleNamespace(data_source_path=f"{__file__}:BrokenSource")
    with pytest.raises(
        PluginError,
        match=rf"--data-source-path .* raised KeyError: 'gold'\n  at {__file__}:\d+ in get_samples",
    ):
        take_groups(BrokenSource(), args, 3)
