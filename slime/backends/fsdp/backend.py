"""The FSDP2 trainer: log-prob passes, optimizer steps, checkpoints and weight export of one rank."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.base import (
    Bucket,
    Denominators,
    Layout,
    Loss,
    MicroBatch,
    NonFiniteStepError,
    StepStats,
    TokenLists,
    TokenOutputs,
)
from slime.backends.fsdp import checkpoint, hf_export
from slime.backends.fsdp.model import PackedCausalLM, load_pretrained, local, shard
from slime.backends.microbatch import split_by_sample
from slime.backends.optimizer import build_optimizer, learning_rate
from slime.backends.weight_copies import LIVE, WeightCopies
from slime.batch.flops import ModelShape, total_forward_flops

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def create_backend(
    args: Any, *, rank: int, world_size: int, device: str | torch.device, total_steps: int | None = None
) -> "FSDPBackend":
    """The trainer of this rank with the weights of --hf-checkpoint, and the reference's if a KL needs one.

    torch.distributed must be initialised. `total_steps` is the number of optimizer steps of the run, over which the
    learning rate decays when --lr-decay-iters is not given.
    """
    assert dist.is_initialized(), "torch.distributed must be initialised before a trainer is created"
    backend = FSDPBackend(args, rank=rank, world_size=world_size, device=torch.device(device), total_steps=total_steps)
    if args.loss_type == "policy_loss" and (args.use_kl_loss or args.kl_coef):
        backend.load_hf(args.ref_load or args.hf_checkpoint, weights="ref")
    return backend


class FSDPBackend:
    """One rank's model shard and optimizer. Every public method is called by all ranks together."""

    def __init__(
        self, args: Any, *, rank: int, world_size: int, device: torch.device, total_steps: int | None = None
    ) -> None:
        self.args = args
        self.rank = rank
        self.layout = Layout(dp_size=world_size, dp_rank=rank)
        self.device = device
        self.optimizer_device = device
        self.compute_dtype = resolve_dtype(args.dtype, device)
        self.decay_steps = args.lr_decay_iters or total_steps
        self.step = 0  # optimizer steps taken
        self.model = PackedCausalLM(load_pretrained(args.hf_checkpoint))
        self.shape = ModelShape.from_hf_config(self.model.lm.config)
        shard(self.model, init_device_mesh(device.type, (world_size,)), self.compute_dtype)
        self.model.to(device)
        self.model.eval()
        self.optimizer = build_optimizer(args, self.model.lm.named_parameters())
        self.copies = WeightCopies(lambda: [local(p.data) for p in self.model.parameters()])

    # -- passes ------------------------------------------------------------------------------------------------------

    def log_probs(self, mbs: list[MicroBatch], *, weights: str = LIVE, entropy: bool = False) -> TokenLists:
        """Log-probs (and entropies) of every response token under the weights tagged `weights`."""
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        with self.copies.active(weights), self._resharded(), torch.no_grad():
            for mb in mbs:
                out = self._forward(mb.to(self.device), entropy=entropy)
                parts = split_by_sample(out.log_probs.cpu(), mb)
                entropies = split_by_sample(out.entropy.cpu(), mb) if entropy else [None] * len(parts)
                # zip stops at once for a micro-batch of weight zero: it has no positions.
                found.update(
                    (p, pair) for p, pair in zip(mb.positions, zip(parts, entropies, strict=True), strict=False)
                )
        ordered = [found[p] for p in sorted(found)]
        return TokenLists([lp for lp, _ in ordered], [h for _, h in ordered] if entropy else None)

    def train_step(self, mbs: list[MicroBatch], loss: Loss, denominators: Denominators) -> StepStats:
        """One optimizer step over all micro-batches; raises without applying it when a number is not finite."""
        self.model.train()
        # FSDP averages gradients over the ranks; the loss is a sum over them.
        scale = self.layout.dp_size / denominators.value
        sums: dict[str, Tensor] = {}
        for mb in mbs:
            mb = mb.to(self.device)
            out = self._forward(mb, entropy=loss.needs_entropy, logits=loss.needs_logits)
            value, metrics = loss.fn(out, mb)
            (value * scale).backward()
            for name, metric in metrics.items():
                sums[name] = sums[name] + metric if name in sums else metric
        self.model.eval()
        metrics, grad_norm = self._reduce(sums, denominators)
        self._check_finite(metrics, grad_norm)
        rates = self._apply(grad_norm)
        return StepStats(metrics=metrics, grad_norm=grad_norm, learning_rates=rates)

    def _forward(self, mb: MicroBatch, *, entropy: bool = False, logits: bool = False) -> TokenOutputs:
        log_probs, entropies, full = self.model(
            mb,
            temperature=self.args.rollout_temperature,
            chunk_size=self.args.log_probs_chunk_size,
            entropy=entropy,
            logits=logits,
        )
        return TokenOutputs(log_probs=log_probs, entropy=entropies, logits=full)

    @contextmanager
    def _resharded(self) -> Iterator[None]:
        """After a pass without backward FSDP keeps the root gathered; a later change of the shards would go unseen."""
        try:
            yield
        finally:
            self.model.reshard()

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _reduce(self, sums: dict[str, Tensor], denominators: Denominators) -> tuple[dict[str, float], float]:
        """Metrics over the whole step and the global gradient norm, in one collective and one transfer."""
        names = sorted(sums)
        gradients = self._gradients()
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum() if gradients else torch.zeros(())
        values = torch.stack([*(sums[name].double() for name in names), square.to(self.device).double()])
        values = self.sum_over_ranks(values).tolist()
        metrics = {name: value / denominators.value for name, value in zip(names, values, strict=False)}
        return metrics, math.sqrt(values[-1]) if values[-1] >= 0 else math.nan

    def _check_finite(self, metrics: dict[str, float], grad_norm: float) -> None:
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not bad and math.isfinite(grad_norm):
            return
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteStepError(
            f"optimizer step {self.step} was not applied: {', '.join([*bad, f'grad_norm={grad_norm}'])}. The weights are "
            "those before the step; lower --lr or look for extreme log-probs or rewards in this batch."
        )

    def _apply(self, grad_norm: float) -> tuple[float, ...]:
        if self.args.clip_grad and grad_norm > self.args.clip_grad:
            torch._foreach_mul_(self._gradients(), self.args.clip_grad / (grad_norm + 1e-6))
        rate = learning_rate(self.args, self.step, self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return tuple(group["lr"] for group in self.optimizer.param_groups)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over the data-parallel ranks, the same on all of them."""
        if self.layout.dp_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def forward_flops(self, lengths: list[int]) -> float:
        """Operations of one forward pass over documents of these lengths."""
        return total_forward_flops(self.shape, lengths)

    # -- weights -----------------------------------------------------------------------------------------------------

    def load_hf(self, path: str | Path, *, weights: str = LIVE) -> None:
        """Read the weights of an HF folder into the live model or under another tag."""
        with self._keep_live(weights):
            checkpoint.load_hf_weights(self.model, path)
            self.copies.copy(LIVE, weights)

    @contextmanager
    def _keep_live(self, weights: str) -> Iterator[None]:
        if weights == LIVE:
            yield
            return
        self.copies.copy(LIVE, "_own")
        try:
            yield
        finally:
            self.copies.copy("_own", LIVE)

    def copy_weights(self, src: str, dst: str) -> None:
        self.copies.copy(src, dst)

    def has_weights(self, tag: str) -> bool:
        return tag in self.copies

    def export(
        self, dtype: torch.dtype | None = None, *, weights: str = LIVE, bucket_bytes: int | None = None
    ) -> Iterator[Bucket]:
        """Buckets of (hub name, full tensor); a collective. Tensors are valid until the next bucket."""
        limit = bucket_bytes or self.args.update_weight_buffer_size
        with self.copies.active(weights):
            yield from hf_export.buckets(self.model.lm, limit, dtype)

    def save_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write an HF folder that `from_pretrained` reads, with the tokenizer of --hf-checkpoint; appears whole or not at all."""
        limit = self.args.update_weight_buffer_size
        hf_export.save_folder(self.model.lm, Path(path), self.args.hf_checkpoint, limit, dtype, self.rank)
        dist.barrier()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> dict[str, Any]:
        """Write weights, optimizer (unless --no-save-optim), schedule position and random state into the folder `path`.

        Returns the manifest that stands beside them."""
        return checkpoint.save(self, Path(path), with_optimizer=not self.args.no_save_optim)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a folder written by `save`, also by another number of ranks; with --finetune only its weights."""
        return checkpoint.load(self, Path(path), weights_only=self.args.finetune)

    def move(self, *, params: str | torch.device | None = None, optimizer: str | torch.device | None = None) -> None:
        """Put parameters and optimizer state on a device; None leaves them where they are. Nothing to do on CPU."""
        if self.device.type == "cpu":
            return
        if params is not None:
            self.model.to(params)
        if optimizer is not None:
            self.optimizer_device = torch.device(optimizer)
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        state[key] = value.to(optimizer)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute precision of --dtype: auto is float32 on CPU and bfloat16 on an accelerator."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]
