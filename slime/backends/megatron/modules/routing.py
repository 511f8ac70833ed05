"""Routes tokens to experts: replayed or recorded choices, balance losses, and load statistics.

A micro-batch's routes travel with its stream to every mixture layer. Choices can be given (those of the
engine that sampled, or of an earlier pass), and can be recorded. Padding counts in no loss and no statistic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime.backends.base import MicroBatch
from slime.backends.megatron.modules.grouped_experts import look_up_experts
from slime.backends.megatron.modules.router_logits import RouterLogits
from slime.backends.megatron.stream import PackedStream, Recorded, Routes

RecordedByBatch = dict[tuple[int, ...], Recorded]  # keyed by the positions of a micro-batch's samples
_LOSSES = ("moe_aux_loss", "moe_z_loss")


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """Decides whether a pass makes, records or replays expert choices, per samples of a micro-batch."""

    step_tokens: float = 1.0
    follow_engine: bool = False  # use the choices recorded in the samples
    record: RecordedByBatch | None = None
    replay: RecordedByBatch | None = None


def build_routes(
    mb: MicroBatch, stream: PackedStream, config: TransformerConfig, plan: RoutingPlan, tp: tuple[int, int]
) -> Routes:
    """`tp`: size and rank of the group that splits the tokens (sequence parallelism), else (1, 0)."""
    lengths = stream.documents.lengths
    device = mb.input_ids.device
    padding = torch.ones(sum(lengths), dtype=torch.bool, device=device)
    if mb.positions:
        padding[stream.real] = False
    tokens = torch.tensor(mb.documents.lengths if mb.positions else [0], dtype=torch.float32, device=device)
    if config.moe_router_load_balancing_type == "seq_aux_loss" and mb.positions:
        groups = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    else:
        groups, tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=device), tokens.sum()[None]
    chosen = None
    if plan.follow_engine and mb.positions:
        assert mb.routed_experts is not None, "`check_routed_experts` runs before"
        chosen = padding.new_full((sum(lengths), *mb.routed_experts.shape[1:]), -1, dtype=torch.int32)
        chosen[stream.real] = mb.routed_experts

    def mine(values: Tensor) -> Tensor:
        values = values if stream.local is None else values[stream.local]
        return values.chunk(tp[0])[tp[1]]

    return Routes(
        padding=mine(padding),
        groups=mine(groups),
        group_tokens=tokens,
        step_tokens=plan.step_tokens,
        chosen=None if chosen is None else mine(chosen),
        replayed=plan.replay[mb.positions] if plan.replay is not None and mb.positions else None,
        record=plan.record.setdefault(mb.positions, {}) if plan.record is not None and mb.positions else None,
    )


class PackedRouter(TopKRouter):
    """Megatron's router, with choices, losses and counts by the routes of the current micro-batch."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.routes: Routes  # set by the layer before each pass
        self.losses = BalanceLosses(config)
        self.counts: Tensor | None = None  # [experts] tokens of training passes since the last drain
        # Megatron's interface for the top k; the losses are slime's.
        self.router_replay = SimpleNamespace(get_replay_topk=self.choose)
        self.routing_type = "none"

    def gating(self, input: Tensor) -> Tensor:
        kinds = {input.dtype, self.weight.dtype}
        on_gpu = input.is_cuda and self.weight.is_cuda
        quick = on_gpu and kinds == {torch.bfloat16} and self.config.moe_router_dtype == "fp32"
        if not quick or self.bias is not None:
            return super().gating(input)
        flat: Tensor = RouterLogits.apply(input.reshape(-1, input.shape[-1]), self.weight)
        return flat.view(*input.shape[:-1], -1)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return logits

    def choose(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices [T, topk] of the experts of each token."""
        values, indices = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.routes.given(self.layer_number - 1)
        if given is not None:
            given = given.to(indices)
            indices = torch.where(given < 0, indices, given)
            values = scores.gather(1, indices)
        if self.routes.record is not None:
            self.routes.record[self.layer_number - 1] = indices.to(torch.int32)
        return values, indices

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits)
        # Recomputed layers run twice: the pass without gradients comes first and counts nothing.
        if self.training and torch.is_grad_enabled():
            real = ~self.routes.padding
            counts = (routing_map & real[:, None]).sum(0).double()
            self.counts = counts if self.counts is None else self.counts + counts
            flat = logits.view(-1, logits.shape[-1])
            probs = self.losses.attach(probs, flat, routing_map, self.routes, self.tp_cp_group)
        return probs, routing_map


@dataclass(slots=True)
class BalanceLosses:
    """Load balancing and z-loss of one layer, as means over the real tokens of an optimizer step.

    Load balancing of a set of n tokens is E sum_i f_i p_i, with f_i the share of choices that fell on expert
    i and p_i its mean probability: 1 where all are used alike. Sets are whole micro-batches (aux_loss) or
    samples (seq_aux_loss).
    """

    config: TransformerConfig
    sums: dict[str, Tensor] = field(default_factory=dict)

    def attach(
        self, probs: Tensor, logits: Tensor, routing_map: Tensor, routes: Routes, group: dist.ProcessGroup
    ) -> Tensor:
        """Return `probs` unchanged; their backward pass also adds the gradients of the losses."""
        balance, z = balance_coefficient(self.config), self.config.moe_z_loss_coeff or 0.0
        total = logits.new_zeros((), dtype=torch.float32)
        if balance:
            loss = self._balance(logits, routing_map, routes, group)
            self._note("moe_aux_loss", loss)
            total = total + balance * loss
        if z:
            real = (~routes.padding).float()
            loss = (torch.logsumexp(logits.float(), dim=-1).square() * real).sum() / routes.step_tokens
            self._note("moe_z_loss", loss)
            total = total + z * loss
        return MoEAuxLossAutoScaler.apply(probs, total) if balance or z else probs

    def _balance(
        self, logits: Tensor, routing_map: Tensor, routes: Routes, group: dist.ProcessGroup
    ) -> Tensor:
        """Return this rank's part: its tokens' probabilities with the counts of the whole micro-batch."""
        real = (~routes.padding).float()[:, None]
        if self.config.moe_router_score_function == "sigmoid":
            scores = torch.sigmoid(logits.float())
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = torch.softmax(logits.float(), dim=-1)
        counts = scores.new_zeros(len(routes.group_tokens), scores.shape[1])
        counts.index_add_(0, routes.groups, routing_map.float() * real)
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        shares = counts / (routes.group_tokens.clamp(min=1.0)[:, None] * self.config.moe_router_topk)
        per_token = (scores * shares[routes.groups] * real).sum()
        return scores.shape[1] * per_token / routes.step_tokens

    def _note(self, name: str, loss: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + loss.detach().double()


def balance_coefficient(config: TransformerConfig) -> float:
    """Return the weight of the load balancing loss; 0: it is off."""
    return 0.0 if config.moe_router_load_balancing_type == "none" else float(config.moe_aux_loss_coeff)


class RoutedLayer(TransformerLayer):
    """A decoder layer that gives its router the routes of the micro-batch, also when it is recomputed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        look_up_experts(self.mlp)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.routes = kwargs["packed_seq_params"].routes
        return super().forward(*args, **kwargs)


def drain_metrics(routers: Sequence[PackedRouter], num_experts: int) -> tuple[Tensor, dict[str, float]]:
    """Counts [layers, experts] since the last call, and the balance losses as means over layers.

    A collective of all ranks.
    """
    own = torch.zeros(len(routers), num_experts + 2, dtype=torch.float64)
    for row, router in enumerate(routers):
        if router.counts is not None:
            own[row, :num_experts] = router.counts.cpu()
        for column, name in enumerate(_LOSSES):
            own[row, num_experts + column] = float(router.losses.sums.get(name, 0.0))
        router.counts, router.losses.sums = None, {}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ([router.layer_number for router in routers], own))
    by_layer: dict[int, Tensor] = {}
    for numbers, values in gathered:
        for number, row in zip(numbers, values, strict=True):
            by_layer[number] = by_layer[number] + row if number in by_layer else row
    rows = torch.stack([by_layer[number] for number in sorted(by_layer)])
    means = rows[:, num_experts:].mean(0).tolist()
    return rows[:, :num_experts], dict(zip(_LOSSES, means, strict=True))
