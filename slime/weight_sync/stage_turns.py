"""Pipeline stages send their weights at the same time, each from its first rank, in a group of its own.

Every stage gathers its next bucket while the others send. Engines that receive in several groups at once
(`Target.parallel_updates`) get buckets of all stages side by side. Other engines work on one update at a
time: SGLang holds a lock over a bucket, and its ranks wait inside the broadcast. If engine A began with a
bucket of stage 0 and engine B with one of stage 1, stage 0's broadcast would wait for B and stage 1's for A,
for ever. Stages therefore take turns with their buckets there, and all engines see the same order. The same
holds for joining a group, which is part of a stage's first bucket: that one is always sent in turn.

When an engine fails, the other stages stop sending at the next turn, because engines with half a model take
the copy on disk.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist

from slime.liveness import waits
from slime.utils.errors import RunStopped
from slime.weight_sync.base import LiveReport, LiveSender, NamedTensors, Target


class StageTurns:
    """Orders the stages' sends; all ranks call it together. `sender`: None on ranks that send nothing.

    `deadline_s`: longest wait for another stage's bucket. It is longer than a sender waits for an engine, so
    that an engine that hangs is evicted before the rank that serves it is given up.
    """

    def __init__(self, stage: int, num_stages: int, sender: LiveSender | None, deadline_s: float = 660.0):
        self._stage, self._num_stages = stage, num_stages
        self._sender, self._deadline_s = sender, deadline_s
        self._senders = [0]  # the sending rank of each stage
        # Groups of all ranks and of the senders; None: a single stage. They carry no weights, so they are
        # on the host.
        self._everyone = self._turns = None
        if num_stages > 1:
            world_size = dist.get_world_size()
            self._everyone = _host_group(list(range(world_size)), num_stages * deadline_s)
            sends: list[int | None] = [None] * world_size
            dist.all_gather_object(sends, stage if sender is not None else None, group=self._everyone)
            self._senders = [sends.index(stage) for stage in range(num_stages)]
            self._turns = _host_group(self._senders, deadline_s)

    def send(
        self, version: str, targets: tuple[Target, ...], buckets: Iterator[NamedTensors]
    ) -> LiveReport | None:
        """Do this rank's part of a push. `buckets`: those of its own stage, a collective of its ranks alone.

        Ranks that send return the report of all stages, others None.
        """
        mine = None
        if self._sender is None:
            for _ in buckets:
                pass  # this rank still takes part in gathering
        else:
            self._sender.open(version, targets)
            self._send_stage(self._sender, buckets, all(target.parallel_updates for target in targets))
            mine = self._sender.finish()
        # The report of a single stage stays with the rank that sends.
        shared = range(self._num_stages) if mine is not None or self._everyone is not None else ()
        reports = [self._share_report(mine, stage) for stage in shared]
        if self._sender is None:
            return None
        return LiveReport(
            sum(report.num_tensors for report in reports),
            sum(report.nbytes for report in reports),
            {url: why for report in reports for url, why in report.failures.items()},
            {rank: report.nbytes for rank, report in zip(self._senders, reports, strict=True)},
        )

    def _send_stage(self, sender: LiveSender, buckets: Iterator[NamedTensors], parallel: bool) -> None:
        bucket, is_broken = next(buckets, None), False
        in_turn = list(range(self._num_stages)) if self._num_stages > 1 else []
        while in_turn and not is_broken:
            for stage in tuple(in_turn):
                mine = stage == self._stage
                if mine and bucket is not None and not is_broken:
                    sender.send(bucket)
                has_sent, has_failed = self._pass_turn(stage, bucket is not None, bool(sender.failures))
                is_broken |= has_failed
                if not has_sent:
                    in_turn.remove(stage)
                if mine:
                    bucket = next(buckets, None)  # gathered while the other stages send
            if parallel:
                in_turn = []
        while bucket is not None:
            if not is_broken:
                sender.send(bucket)
            bucket = next(buckets, None)  # ranks that send nothing gather all of it, also after a failure

    def _pass_turn(self, stage: int, has_sent: bool, has_failed: bool) -> tuple[bool, bool]:
        """End the turn of a stage; return whether it has sent a bucket, and whether an engine has failed."""
        state = torch.tensor([has_sent, has_failed])
        with self._waiting_for(stage, "turn"):
            dist.broadcast(state, src=self._senders[stage], group=self._turns)
        return bool(state[0]), bool(state[1])

    def _share_report(self, report: LiveReport | None, stage: int) -> LiveReport:
        """Send the stage's report to all ranks when the stage is done."""
        box = [report]
        if self._everyone is not None:
            with self._waiting_for(stage, "part"):
                dist.broadcast_object_list(box, src=self._senders[stage], group=self._everyone)
        assert box[0] is not None, "the sender of a stage has a report"
        return box[0]

    @contextlib.contextmanager
    def _waiting_for(self, stage: int, what: str) -> Iterator[None]:
        rank, deadline_s = (
            self._senders[stage],
            self._deadline_s * (1 if what == "turn" else self._num_stages),
        )
        try:
            with waits.waiting(
                f"the {what} of stage {stage}", deadline_s=deadline_s, target=f"trainer-{rank}"
            ):
                yield
        except RuntimeError as error:  # error of the group: out of time, or a member is gone
            raise RunStopped(
                f"trainer rank {rank}, which sends the weights of stage {stage}, did not finish its {what} "
                f"within {deadline_s:.0f} s (--timeouts update-weight and a minute): {error}"
            ) from error


def _host_group(ranks: list[int], deadline_s: float) -> dist.ProcessGroup | None:
    """Create a gloo group; all ranks call it, members or not."""
    group: dist.ProcessGroup | None = dist.new_group(
        ranks, backend="gloo", timeout=datetime.timedelta(seconds=deadline_s)
    )
    return group
