"""Schedules rollouts: which ids run, and after which of them the run evaluates and saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments import Args
from slime.utils.misc import should_run_periodic_action


@dataclass(frozen=True, slots=True)
class RolloutSchedule:
    """Iterates over rollout ids. `num_rollout_per_epoch` None: the data has no epochs."""

    args: Args
    start: int
    num_rollout: int
    num_rollout_per_epoch: int | None

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.num_rollout))

    @property
    def eval_only(self) -> bool:
        return self.num_rollout == 0 and self.args.eval_interval is not None

    def has_next(self, rollout_id: int) -> bool:
        return rollout_id + 1 < self.num_rollout

    def eval_before(self, rollout_id: int) -> bool:
        return (
            self.args.eval_interval is not None and rollout_id == 0 and not self.args.skip_eval_before_train
        )

    def eval_after(self, rollout_id: int) -> bool:
        return should_run_periodic_action(rollout_id, self.args.eval_interval, self.num_rollout_per_epoch)

    def save_after(self, rollout_id: int) -> bool:
        """Return whether a checkpoint (--save), a model (--save-hf) or both follow this rollout."""
        if self.args.save is None and (self.args.save_hf is None or self.args.debug_rollout_only):
            return False
        if self.args.release_train:  # what the next processes of the trainer begin from
            return True
        return rollout_id == self.num_rollout - 1 or should_run_periodic_action(
            rollout_id, self.args.save_interval, self.num_rollout_per_epoch, self.num_rollout
        )
