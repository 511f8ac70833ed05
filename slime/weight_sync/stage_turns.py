"""Pipeline stages send in turns, first to last: each from its first rank, in a process group of its own.

Why in turns: an engine works on one update at a time (SGLang holds a lock over a bucket, and its ranks wait
inside the broadcast). If two stages sent at once, engine A could begin with a bucket of stage 0 and engine B
with one of stage 1. Stage 0's broadcast would then wait for B and stage 1's for A, and neither could ever
end. The same holds for joining a group. So a stage's whole part (leaving an old group, joining, all of its
buckets) lies in its turn, and all engines see the same order. What an engine receives is what one sender
would have sent: the same buckets, in the same order.

A stage that fails ends the push: those after it send nothing, because engines
with half a model take the copy on disk.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import torch.distributed as dist

from slime.liveness import waits
from slime.utils.errors import RunStopped
from slime.weight_sync.base import LiveReport, LiveSender, NamedTensors, Target


class StageTurns:
    """Orders the stages' sends; all ranks call it together. `sender`: None on ranks that send nothing.

    `deadline_s`: longest wait of the others for a sender. It is longer than a sender waits for an engine, so
    that an engine that hangs is evicted before the rank that serves it is given up.
    """

    def __init__(self, stage: int, num_stages: int, sender: LiveSender | None, deadline_s: float = 660.0):
        self._stage, self._num_stages = stage, num_stages
        self._sender, self._deadline_s = sender, deadline_s
        self._group: dist.ProcessGroup | None = None  # None: a single stage needs no turns
        if num_stages > 1:
            # The group carries reports, not tensors, so it is on the host.
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=deadline_s))
            sends: list[int | None] = [None] * dist.get_world_size()
            dist.all_gather_object(sends, stage if sender is not None else None, group=self._group)
            self._senders = [sends.index(stage) for stage in range(num_stages)]

    def send(
        self, version: str, targets: tuple[Target, ...], buckets: Iterator[NamedTensors]
    ) -> LiveReport | None:
        """Do this rank's part of a push. `buckets`: those of its own stage, a collective of its ranks alone.

        Ranks that send return the report of all stages, others None.
        """
        reports: list[LiveReport] = []
        for stage in range(self._num_stages):
            mine = self._send_stage(version, targets, buckets) if stage == self._stage else None
            report = self._share_report(mine, stage)
            if report is not None:
                reports.append(report)
                if report.failures:
                    break
        if self._sender is None:
            return None
        failures = {url: why for report in reports for url, why in report.failures.items()}
        return LiveReport(
            sum(r.num_tensors for r in reports),
            sum(r.nbytes for r in reports),
            failures,
            max(r.nbytes for r in reports),
        )

    def _send_stage(
        self, version: str, targets: tuple[Target, ...], buckets: Iterator[NamedTensors]
    ) -> LiveReport | None:
        if self._sender is None:
            for _ in buckets:
                pass  # this rank still takes part in gathering
            return None
        self._sender.open(version, targets)
        for bucket in buckets:
            self._sender.send(bucket)
        return self._sender.finish()

    def _share_report(self, report: LiveReport | None, stage: int) -> LiveReport | None:
        """Send the stage's report to all ranks when the stage is done: then the next one starts."""
        if self._group is None:
            return report
        box, sender = [report], self._senders[stage]
        try:
            what, target = f"the turn of stage {stage}", f"trainer-{sender}"
            with waits.waiting(what, deadline_s=self._deadline_s, target=target):
                dist.broadcast_object_list(box, src=sender, group=self._group)
        except RuntimeError as error:  # error of the group: out of time, or a member is gone
            raise RunStopped(
                f"trainer rank {sender}, which sends the weights of stage {stage}, did not finish its turn "
                f"within {self._deadline_s:.0f} s (--timeouts update-weight and a minute): {error}"
            ) from error
        return box[0]
