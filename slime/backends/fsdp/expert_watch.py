"""Watches a mixture of experts during a step: how evenly experts are used, and a loss that balances them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.expert_balance import balance_losses
from slime.arguments import Args
from slime.backends.base import Denominators, Metrics, MicroBatch
from slime.backends.fsdp.layer_execution import HFModel


class ExpertWatch:
    """Listens to a model's routers: modules with `top_k` and `num_experts` that return chosen indices last.

    `balance`: coefficient of the loss for even use; 0: none.
    """

    def __init__(self, lm: HFModel, balance: float = 0.0) -> None:
        self._balance = balance
        self._listens = False
        self._copies: Tensor | None = None
        self._counts: dict[int, Tensor] = {}
        self._routes: list[tuple[Tensor, Tensor]] = []  # by layer: logits [T, E], chosen [T, k]
        for index, router in enumerate(routers(lm)):
            router.register_forward_hook(functools.partial(self._record, index))

    @property
    def has_balance(self) -> bool:
        return self._balance != 0

    @contextmanager
    def listening(self, mb: MicroBatch, copies: Tensor | None = None) -> Iterator[None]:
        """Record routing during a training forward pass; recomputation and padding are not counted.

        `copies` [T]: for how many samples each token of the stream stands; None: for one.
        """
        self._listens, self._routes, self._copies = bool(mb.positions), [], copies
        try:
            yield
        finally:
            self._listens = False

    def _record(self, index: int, router: Any, _inputs: Any, output: Any) -> None:
        if not (self._listens and isinstance(output, tuple) and output[-1].dtype == torch.int64):
            return
        if self._balance:
            self._routes.append((output[0], output[-1]))
        picked = output[-1].detach()
        chosen = picked.flatten()
        counts = torch.zeros(router.num_experts, dtype=torch.float64, device=chosen.device)
        once = torch.ones_like(chosen, dtype=torch.float64)
        weights = once if self._copies is None else self._copies.repeat_interleave(picked.shape[-1]).double()
        counts.index_add_(0, chosen, weights)
        self._counts[index] = self._counts[index] + counts if index in self._counts else counts

    def add_balance(
        self, value: Tensor, metrics: Metrics, mb: MicroBatch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """The loss of a micro-batch and its metrics, with the balance of its samples: a mean over layers."""
        routes, self._routes = self._routes, []
        if not self._balance:
            return value, metrics
        if not mb.positions:
            # Every rank brings the same metrics.
            return value, {**metrics, "moe_aux_loss": torch.zeros((), device=value.device)}
        lengths = torch.tensor(mb.documents.lengths, device=mb.input_ids.device)
        documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        layers = [balance_losses(logits, chosen, documents, len(lengths)) for logits, chosen in routes]
        # Sums leave here, and are divided by the step's own count: of rollouts, tokens or samples.
        factor = denominators.value / max(denominators.samples, 1)
        balance = torch.stack(layers).mean(0)[: mb.num_samples].sum() * factor
        return value + self._balance * balance, {**metrics, "moe_aux_loss": balance.detach()}

    def take(self) -> Tensor | None:
        """Counts [layers, experts] since the last call; None for a model without experts."""
        if not self._counts:
            return None
        counts = torch.stack([self._counts[index] for index in sorted(self._counts)])
        self._counts = {}
        return counts


def routers(lm: HFModel) -> list[Any]:
    return [
        m for m in lm.modules() if hasattr(m, "top_k") and hasattr(m, "num_experts") and hasattr(m, "weight")
    ]


def balance_coefficient(args: Args, lm: HFModel) -> float:
    """Return --router-aux-loss-coef, or the coefficient of a config whose training uses the loss."""
    asked = args.router_aux_loss_coef
    config = lm.config.get_text_config()
    known = vars(config).get("router_aux_loss_coef")
    if asked is None:
        asked = known if known and vars(config).get("output_router_logits") else 0.0
    if asked and (known is None or not routers(lm)):
        raise ValueError(
            f"--router-aux-loss-coef is {asked}, but {config.model_type} has no router that such a loss is "
            "known for: remove it."
        )
    if asked and args.context_parallel_size > 1:
        raise ValueError(
            f"--router-aux-loss-coef {asked}: how evenly a sample uses the experts is only known where all "
            "its tokens are; use --context-parallel-size 1, or --router-aux-loss-coef 0."
        )
    return float(asked)
