"""TrajectoryManager: turns by their token ids, leaves as samples."""

import pytest

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample

BASE = Sample(index=4, group_index=1, prompt="q", label="a", metadata={"k": 1})
USER = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}


def turn(prompt, output, finish="stop", log_probs=None):
    return TurnRecord(prompt, output, finish, [-0.1 * i for i in output] if log_probs is None else log_probs)


def record(manager, prompt, output, messages=(USER,), **options):
    manager.record_turn(
        "s", turn=turn(prompt, output, **options), prompt_messages=messages, response_message=SAID
    )


def test_turns_that_continue_each_other_are_one_sample():
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 4, 9, 9], [5], [USER, SAID, USER])
    (sample,) = manager.get_trajectory("s", base_sample=BASE, reward=0.5, extra_metadata={"e": 2})
    assert sample.tokens == [1, 2, 3, 4, 9, 9, 5] and sample.response_length == 5
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([-0.3, -0.4, 0, 0, -0.5])
    assert (sample.reward, sample.rollout_id, sample.label) == (0.5, 4, "a")
    assert sample.metadata["k"] == 1 and sample.metadata["e"] == 2
    assert [(t["start"], t["end"]) for t in sample.metadata["turns"]] == [(0, 2), (4, 5)]
    assert manager.turn_count("s") == 2 and manager.has_session("s")
    manager.drop_session("s")
    assert not manager.has_session("s") and manager.get_trajectory("s", base_sample=BASE) == []


def test_a_turn_that_two_leaves_share_trains_once():
    manager = TrajectoryManager()
    record(manager, [1], [2])
    record(manager, [1, 2, 7], [3], [USER, SAID, USER])
    record(manager, [1, 2, 8], [4], [USER, SAID, USER])
    first, second = manager.get_trajectory("s", base_sample=BASE)
    assert first.loss_mask == [1, 0, 1] and second.loss_mask == [0, 0, 1]
    assert first.rollout_id == second.rollout_id == 4


def test_a_rollout_id_of_zero_is_one():
    manager = TrajectoryManager()
    record(manager, [1], [2])
    (sample,) = manager.get_trajectory("s", base_sample=Sample(index=9, rollout_id=0))
    assert sample.rollout_id == 0


def test_a_short_answer_to_a_prompt_rendered_anew_takes_the_place_of_the_answer_before():
    manager = TrajectoryManager(fork_threshold_tokens=10)
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 5, 9], [6], [USER, SAID, USER])  # 4 came back as 5
    (sample,) = manager.get_trajectory("s", base_sample=BASE)
    assert sample.tokens == [1, 2, 3, 5, 9, 6] and sample.response_length == 1


def test_without_a_threshold_both_are_trained():
    manager = TrajectoryManager(fork_threshold_tokens=None)
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 5, 9], [6], [USER, SAID, USER])
    assert [sum(s.loss_mask) for s in manager.get_trajectory("s", base_sample=BASE)] == [2, 1]


def test_a_retry_with_other_messages_is_a_leaf_of_its_own():
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 8], [6], [USER, USER])
    assert len(manager.get_trajectory("s", base_sample=BASE)) == 2


def test_what_has_no_log_probs_is_not_trained_and_a_sample_of_it_alone_is_left_out():
    manager = TrajectoryManager()
    record(manager, [1], [2], log_probs=[])
    assert manager.get_trajectory("s", base_sample=BASE) == []


def test_a_sample_is_cut_where_the_limit_is():
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 4, 9, 9], [5, 6], [USER, SAID, USER])
    (sample,) = manager.get_trajectory("s", base_sample=BASE, max_sample_tokens=7)
    assert sample.tokens == [1, 2, 3, 4, 9, 9, 5] and sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.status is Sample.Status.TRUNCATED and sample.metadata["turns"][1]["end"] == 5
