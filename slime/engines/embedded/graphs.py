"""CUDA graphs of decode passes: recorded once per batch size and replayed.

A pass of a small model consists of hundreds of kernels that take microseconds each, so launching them from
Python takes longer than computing them. The recorded pass reads its inputs from fixed buffers; sequences are
padded to the next power of two, and the padding writes to a page that is never handed out.

A recording contains addresses of the weights, whose values may change in place, and of the pool. Code that
moves either must create a new `DecodeGraphs`.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from slime.engines.embedded.attention import BatchPlan, DecodeGroup
from slime.utils.machine.accelerator import gpu

logger = logging.getLogger(__name__)
Forward = Callable[[BatchPlan], torch.Tensor]
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ROPES_BY_LENGTH = ("dynamic", "longrope")


def decides_on_host(config: Any) -> bool:
    """Return whether models of such a configuration read numbers back from the device within a pass.

    Experts count their tokens, and some rotary positions depend on the longest sequence: a recording of such
    a pass would hold for one case only.
    """
    values = config.to_dict()
    ropes = [values.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    kinds = {rope.get("rope_type", rope.get("type")) for rope in ropes}
    return any(values.get(name) for name in _EXPERT_COUNTS) or bool(kinds & set(_ROPES_BY_LENGTH))


class DecodeGraphs:
    """Computes decode plans with recorded graphs; on a CPU it uses the same buffers without recording."""

    def __init__(self, forward: Forward, *, max_running: int, max_blocks: int, device: torch.device):
        self.forward, self.device = forward, device
        rows = bucket_of(max_running)
        self._ids, self._positions, self._write_rows = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self._order = torch.arange(rows, device=device)
        # By number of rows: the function that computes the logits from the buffers.
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        self._memory = gpu.graph_pool_handle() if device.type == "cuda" else None

    def run(self, plan: BatchPlan) -> torch.Tensor | None:
        """Return logits of a decode pass, valid until the next one; None: it cannot be recorded."""
        group = plan.decode[0]
        assert isinstance(group, DecodeGroup), "spans have a different shape in every pass"
        size = bucket_of(group.count)
        self._fill(plan, group, size)
        if size not in self._replays:
            try:
                self._replays[size] = self._record(size)
            except Exception as error:  # it runs kernel by kernel, like a pass with a prompt
                logger.warning(
                    "Decoding runs without CUDA graphs and is slower: %s: %s", type(error).__name__, error
                )
                return None
        return self._replays[size]()[: group.count]

    def _fill(self, plan: BatchPlan, group: DecodeGroup, size: int) -> None:
        count = group.count
        self._ids[:count].copy_(plan.token_ids[0])
        self._positions[:count].copy_(plan.positions[0])
        self._write_rows[:count].copy_(plan.write_rows)
        self._lengths[:count].copy_(group.lengths)
        self._table[:count, : group.table.shape[1]].copy_(group.table)
        if count < size:
            self._write_rows[count:size].zero_()
            self._lengths[count:size].fill_(1)

    def _record(self, size: int) -> Callable[[], torch.Tensor]:
        plan = BatchPlan(
            token_ids=self._ids[None, :size],
            positions=self._positions[None, :size],
            write_rows=self._write_rows[:size],
            logit_index=self._order[:size],
            decode=(DecodeGroup(0, size, self._table[:size], self._lengths[:size], in_place=True),),
            prefill=(),
        )
        if self.device.type != "cuda":
            return lambda: self.forward(plan)
        # Run once without recording: kernels are compiled and libraries get workspaces. The replay writes the
        # same keys again.
        current, aside = gpu.current_stream(self.device), gpu.Stream(self.device)
        aside.wait_stream(current)
        with gpu.stream(aside):
            self.forward(plan)
        current.wait_stream(aside)
        graph = gpu.CUDAGraph()
        with gpu.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self.forward(plan)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


def bucket_of(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()
