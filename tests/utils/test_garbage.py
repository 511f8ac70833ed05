"""The search for cycles leaves out what a process held before, for the time of a run alone."""

import gc

from slime.utils.machine.garbage import searching_new_only


class Node:
    def __init__(self) -> None:
        self.me = self


def test_what_was_there_is_left_out_for_the_block_and_looked_at_again_behind_it():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with searching_new_only():
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[0] > thresholds[0]
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_a_cycle_that_is_made_inside_is_found():
    import weakref

    with searching_new_only():
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None


def test_thresholds_come_back_after_a_failure():
    thresholds = gc.get_threshold()
    try:
        with searching_new_only():
            raise KeyError
    except KeyError:
        pass
    assert gc.get_threshold() == thresholds
