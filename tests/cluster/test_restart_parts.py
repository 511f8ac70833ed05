"""The parts of a restart of the trainer: what is done again, from what, and how often."""

import pytest

from slime.cluster.restart.recovery import Recovery, _Budget, cause_of
from slime.cluster.restart.replay import KeptBatches, ReplayEntry, ReplayLog, SafeState, UnreadableState
from slime.cluster.training.train_group import TrainerLost
from slime.utils.errors import RunStopped, WorkerDied


def a_replay(done):
    replay = ReplayLog(SafeState(None, None, -1))

    def entry(name, **more):
        return ReplayEntry(name, lambda: done.append(name), **more)

    return replay, entry


def test_everything_behind_the_safe_state_is_done_again_in_order():
    done = []
    replay, entry = a_replay(done)
    for name in ("weights 1", "step 1", "weights 2"):
        replay.append(entry(name))
    replay.run()
    replay.run()  # the trainer was lost once more
    assert done == ["weights 1", "step 1", "weights 2"] * 2


def test_a_committed_state_covers_what_was_done_before_it_was_begun():
    done = []
    replay, entry = a_replay(done)
    replay.append(entry("step 1", setting=("lr", 0.1)))
    replay.begin_save(SafeState(None, "folder", 0))
    replay.append(entry("weights 2"))  # while ranks still write
    replay.commit(0)
    replay.run()
    assert done == ["weights 2"]
    assert (replay.safe.rollout_id, replay.safe.settings) == (0, {"lr": 0.1})


def test_a_checkpoint_that_was_being_written_is_written_again_at_its_place():
    done = []
    replay, entry = a_replay(done)
    replay.append(entry("step 1"))

    def save():
        done.append("save")
        replay.begin_save(SafeState(None, "folder", 0))
        replay.commit(0)

    replay.begin_save(SafeState(None, "folder", 0))
    replay.append(ReplayEntry("save", save, saves=0))
    replay.append(entry("step 2"))
    replay.run()
    assert done == ["step 1", "save", "step 2"]
    replay.run()
    assert done[3:] == ["step 2"], "what the checkpoint covers is not done a third time"


def copies_after_a_checkpoint(num_states=None):
    """The checkpoint of step 1, and copies of steps 2 and 3."""
    done = []
    replay = ReplayLog(SafeState(None, None, -1), num_states=num_states)
    for step in range(4):
        replay.append(
            ReplayEntry(f"step {step + 1}", lambda step=step: done.append(step), setting=("lr", step))
        )
        if step < 3:
            replay.begin_save(SafeState(None, f"folder {step}", step))
            replay.commit(step, copied={} if step else None)
    return replay, done


def test_where_a_copy_cannot_be_read_the_one_before_it_and_then_the_checkpoint_are_taken():
    replay, done = copies_after_a_checkpoint()
    begun = []
    while True:
        begun.append((replay.safe.rollout_id, replay.safe.settings["lr"]))
        replay.run()
        if replay.fall_back() is None:
            break
    assert begun == [(2, 2), (1, 1), (0, 0)]
    assert done == [3, *(2, 3), *(1, 2, 3)]
    assert replay.oldest.rollout_id == 0


def test_where_batches_are_not_kept_two_states_are():
    replay, done = copies_after_a_checkpoint(num_states=2)
    assert (replay.oldest.rollout_id, replay.safe.rollout_id) == (1, 2)
    assert replay.fall_back() is replay.oldest and replay.fall_back() is None
    replay.run()
    assert done == [2, 3]


def test_a_later_checkpoint_stands_for_all_states_before_it():
    replay, done = copies_after_a_checkpoint()
    replay.begin_save(SafeState(None, "folder 3", 3))
    replay.commit(3)
    replay.run()
    assert done == [] and replay.fall_back() is None


def test_batches_in_memory_go_all_at_once_where_there_is_no_room():
    batches = KeptBatches(None, most_bytes=200)
    batches.keep(0, {"tokens": [1]})
    assert batches.get(0) == {"tokens": [1]}
    batches.keep(1, {"tokens": list(range(1000))})
    batches.keep(2, {"tokens": [3]})
    assert [batches.get(i) for i in range(3)] == [None] * 3
    batches.forget(2)  # a checkpoint covers them
    batches.keep(3, {"tokens": [4]})
    assert batches.get(3) == {"tokens": [4]}


def test_pauses_grow_and_the_end_names_every_cause():
    budget, pauses = _Budget(limit=3), []
    for _ in range(3):
        budget.spend(4, "trainer-0 was killed by signal 9", WorkerDied(""))
        pauses.append(budget.pause_s)
    assert pauses == [0.0, 2.0, 4.0]
    with pytest.raises(RunStopped, match=r"lost 4 times.*\(--max-restarts 3\): step 5: .*; then step 5: .*x"):
        budget.spend(4, "x", WorkerDied(""))


class FakeRanks:
    """Ranks of which those in `gone` have died."""

    def __init__(self, gone=()):
        self.gone, self.lost, self.num_losses = list(gone), None, 0

    def find_lost(self):
        return [WorkerDied(f"{name} was killed by signal 9; last lines of log:\nnone") for name in self.gone]

    def lose(self, cause):
        self.lost, self.num_losses, self.gone = cause, self.num_losses + 1, []

    def find(self):
        self.lost = None

    def end(self):
        pass


class FakeRuntime:
    def forget_failure(self):
        pass


def test_an_error_is_a_fault_where_a_rank_is_gone_or_a_connection_broke():
    said = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:42")
    assert cause_of(said, FakeRanks(["trainer-1"])) == "trainer-1 was killed by signal 9"
    assert "the ranks lost each other (RuntimeError: [pair.cc" in cause_of(said, FakeRanks())
    assert cause_of(ValueError("a mistake in a loss"), FakeRanks()) is None
    assert cause_of(RuntimeError("CUDA out of memory"), FakeRanks()) is None
    assert cause_of(WorkerDied("rollout was killed by signal 9"), FakeRanks()) is None


def a_recovery(ranks, limit=2):
    restored, told = [], []
    recovery = Recovery(
        limit, ranks, FakeRuntime(), ReplayLog(SafeState(None, None, -1)), restored.append, told.append
    )
    return recovery, restored, told


def test_work_is_begun_again_once_the_ranks_are_replaced():
    ranks = FakeRanks()
    recovery, restored, told = a_recovery(ranks)
    answers = iter([WorkerDied("trainer-0 was killed"), TrainerLost("found later"), 7])

    def work():
        answer = next(answers)
        if isinstance(answer, TrainerLost):
            return 7
        if isinstance(answer, Exception):
            ranks.gone = ["trainer-0"]
            raise answer
        return answer

    assert recovery.run(4, work) == 7
    assert len(restored) == 1 and [restart["step"] for restart in told] == [5]


def test_a_damaged_copy_is_named_and_the_state_before_it_restored(caplog):
    replay, done = copies_after_a_checkpoint()
    tried = []

    def restore(state):
        tried.append(state.rollout_id)
        if state.copied is not None:
            raise UnreadableState(f"folder {state.rollout_id} is damaged: a.distcp: 3 bytes instead of 5")

    ranks = FakeRanks(["trainer-0"])
    recovery = Recovery(2, ranks, FakeRuntime(), replay, restore, lambda restart: None)
    recovery.handle_loss(WorkerDied("gone"), 4)
    assert recovery.run(4, lambda: 7) == 7
    assert tried == [2, 1, 0] and done == [1, 2, 3]
    assert "its state after step 3 cannot be read (folder 2 is damaged: a.distcp: 3 bytes" in caplog.text
    assert "the trainer starts from its state after step 1 instead" in caplog.text


def test_a_damaged_checkpoint_ends_the_run_with_its_name():
    replay = ReplayLog(SafeState(None, "folder", 3))

    def restore(state):
        raise UnreadableState("ckpt/step_0000003 is damaged: trainer/a.distcp: its content has changed")

    recovery = Recovery(2, FakeRanks(["trainer-0"]), FakeRuntime(), replay, restore, lambda restart: None)
    recovery.handle_loss(WorkerDied("gone"), 4)
    with pytest.raises(RunStopped, match=r"step_0000003 is damaged.*resumes from the checkpoint before"):
        recovery.run(4, lambda: 7)


def test_a_limit_of_zero_ends_the_run_with_the_first_loss():
    ranks = FakeRanks(["trainer-0"])
    recovery, restored, _ = a_recovery(ranks, limit=0)

    def work():
        raise WorkerDied("trainer-0 was killed by signal 9")

    with pytest.raises(WorkerDied, match="trainer-0"):
        recovery.run(0, work)
    assert not restored and not ranks.num_losses


def test_a_new_step_pays_for_earlier_losses():
    ranks = FakeRanks()
    recovery, _, _ = a_recovery(ranks, limit=1)
    for step in range(3):
        ranks.gone, ranks.lost = ["trainer-0"], None
        recovery.handle_loss(WorkerDied("gone"), step)
        recovery.note_trained(step)
    assert recovery.num_restarts == 3
