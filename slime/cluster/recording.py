"""Hands the samples of every rollout and evaluation to the record of the run."""

from __future__ import annotations

from collections.abc import Sequence

from slime.arguments import Args
from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.journal import Settled
from slime.utils.run_identity import Run


class Recording:
    """The record's writer for one run; `writer` None: --record-max-mib is 0, and nothing is recorded."""

    def __init__(self, run: Run, args: Args):
        self._reward_key = args.reward_key
        self._eval_reward_key = args.eval_reward_key or args.reward_key
        self.writer: RecordWriter | None = None
        if args.record_max_mib:
            self.writer = RecordWriter(
                run.run_dir / RECORD_FILE,
                run.run_id,
                args.record_max_mib << 20,
                sync=args.record_sync,
                start=run.num_starts,
                max_days=args.record_max_days,
                keeps_uncommitted=args.save is not None,
            )

    def rollout(
        self,
        rollout_id: int,
        output: RolloutFnTrainOutput,
        dropped: Sequence[Settled],
        version: str | None,
    ) -> None:
        """The groups that are trained on, and those that were dropped while they were collected."""
        if self.writer is not None:
            entries = group_entries(output.samples, "trained")
            for settled in dropped:
                entries += group_entries([settled.group], settled.outcome, settled.reason)
            self.writer.add("train", rollout_id, entries, version=version, reward_key=self._reward_key)

    def evaluation(self, rollout_id: int, output: RolloutFnEvalOutput, version: str | None) -> None:
        if self.writer is not None:
            entries = [
                entry
                for dataset, result in output.data.items()
                for entry in group_entries(result.get("samples") or [], "evaluated", dataset=dataset)
            ]
            self.writer.add("eval", rollout_id, entries, version=version, reward_key=self._eval_reward_key)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
