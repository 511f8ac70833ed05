"""The FSDP2 trainer: log-prob passes, optimizer steps, checkpoints and weight export of one rank."""

import logging
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.algorithms.expert_balance import load_metrics
from slime.algorithms.model_parts import decoder_layers
from slime.arguments import Args
from slime.backends.attention.context_parallel import StreamShare
from slime.backends.attention.share import Share
from slime.backends.attention.shared_prefixes import PrefixShare
from slime.backends.base import (
    Bucket,
    Denominators,
    Loss,
    MicroBatch,
    StepPlace,
    StepStats,
    TokenOutputs,
)
from slime.backends.fp8.linear import use_fp8
from slime.backends.fsdp import (
    dcp_checkpoint,
    families,
    grouped_experts,
    hf_export,
    loading,
    lora,
    tensor_parallel,
    vision,
)
from slime.backends.fsdp.expert_replay import ExpertReplay
from slime.backends.fsdp.expert_watch import ExpertWatch
from slime.backends.fsdp.int4_training import use_int4
from slime.backends.fsdp.layer_execution import prepare_layers, require_input_gradient
from slime.backends.fsdp.loss_scale import LossScale
from slime.backends.fsdp.mesh import Mesh
from slime.backends.fsdp.model import PackedCausalLM, WholeMatrix, gather_full, reshard, shard
from slime.backends.fsdp.muon import Muon, hidden_matrices
from slime.backends.fsdp.scalar_model import PackedLM, PackedScalarLM
from slime.backends.fsdp.working_copy import WorkingCopy
from slime.backends.shared.checkpoint_errors import plain_errors
from slime.backends.shared.draw_weights import draw_weights
from slime.backends.shared.host_memory import HostMemory
from slime.backends.shared.learning_rate import learning_rate
from slime.backends.shared.microbatch import by_sample
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW, local
from slime.backends.shared.trainable import freeze
from slime.backends.shared.trainer_base import TrainBackend
from slime.backends.shared.trainer_folder import read_manifest
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.backends.torch_dist.reading import weights_source
from slime.catalog.families import is_verified, refusal

logger = logging.getLogger(__name__)

_COMPILE_FROM_WIDTH = 1024


class FSDPBackend(TrainBackend):
    """One rank's model shard and optimizer. Every public method is called by all ranks together."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        device: str | torch.device,
        role: str = LIVE,
        random_weights: bool = False,
    ) -> None:
        super().__init__(args, rank=rank, device=torch.device(device), role=role)
        self.teacher: PackedCausalLM | None = None  # of another shape; else a tagged copy
        self.mesh = Mesh.build(args, rank, world_size, self.device.type)
        self.layout, self.data_group = self.mesh.layout, self.mesh.data_group
        self.pending_save: Future[Any] | None = None  # with --async-save: the state that is being written
        self.save_group: dist.ProcessGroup | None = None  # set by the first such save
        self.loss_scale = LossScale() if self.compute_dtype == torch.float16 else None
        self.model = self._build_model()
        self.hf_config = self.model.lm.config
        self.has_experts = families.has_experts(self.hf_config.get_text_config())
        freeze(args, [((name,), parameter) for name, parameter in self.model.lm.named_parameters()])
        if args.freeze_vision_tower:
            vision.freeze_tower(self.model.lm)
        lora.add_adapters(args, self.model.lm)
        self._set_costs(self.hf_config, self.model.lm.parameters())
        follows = args.use_rollout_routing_replay and role == LIVE
        self.replay = ExpertReplay(self.model.lm) if follows else None
        self.experts = ExpertWatch(self.model.lm)
        if args.share_prefix and not families.can_share_prefixes(self.model.lm):
            # Micro-batches, sized for shared prompts, would be too large.
            raise ValueError(
                f"--share-prefix: a {self.hf_config.model_type} cannot share prefixes, because its layers "
                "need every sample whole; remove it."
            )
        self.working = self._place(self.model, None if random_weights else self.start)
        self.optimizer = build_optimizer(args, self.model.lm)
        self._host = HostMemory()
        self.copies = WeightCopies(lambda: [local(p.data) for p in self.model.parameters()])

    def _build_model(self) -> PackedLM:
        """Build the model without storage: a policy, a critic (reads before each token) or a reward model."""
        lm = loading.empty_model(self.hf_checkpoint)
        kind = lm.config.model_type
        if not (self.args.allow_unverified_model or is_verified(kind, self.args.train_backend)):
            raise families.NotTrainable(f"--hf-checkpoint {refusal(self.hf_checkpoint, kind)}")
        if self.args.context_parallel_size > 1 and families.needs_whole_documents(lm):
            raise ValueError(
                f"--context-parallel-size {self.args.context_parallel_size}: {lm.config.model_type} has "
                "layers that need all tokens of a sample on one rank; use --context-parallel-size 1."
            )
        self.start = weights_source(self.args.start_from, lm.config, self.hf_checkpoint)
        if not self.is_scalar:
            return PackedCausalLM(lm)
        after = self.role != "critic"
        return PackedScalarLM(lm, self.start, after_token=after, seed=self.args.seed)

    def _place(self, model: PackedLM, path: str | Path | None) -> WorkingCopy | None:
        """Spread the model over the ranks, allocate it and read the weights of `path` (None: random ones).

        A rank that is alone needs no sharding; in 16 bit it computes on a copy, which is returned.
        """
        args, layers = self.args, decoder_layers(model.lm)
        known = loading.known_values(model.lm)
        compiles = self._compiles()
        grouped_experts.use_operator(model.lm)
        if args.fp8_training:
            use_fp8(layers, self.device, self.compute_dtype)
            grouped_experts.use_fp8(model.lm, layers, self.device)
        if args.rollout_quantization == "int4" and self.role == LIVE and model is self.model:
            use_int4(model.lm, self.device, self.compute_dtype)
        if compiles:
            grouped_experts.keep_out_of_compiling(layers)
            require_input_gradient(model.lm)
        prepare_layers(
            layers, model.lm.config, checkpointing=args.activation_checkpointing, compiled=compiles
        )
        if self.mesh.tensor is not None:
            tensor_parallel.apply(model.lm, self.mesh.tensor)
        alone = dist.get_world_size() == 1 and not args.fsdp_cpu_offload
        if not alone:
            shard(model, self.mesh.shard, self.compute_dtype, offload=args.fsdp_cpu_offload)
        storage = torch.device("cpu") if args.fsdp_cpu_offload else self.device
        loading.allocate(model, storage, compute=self.device)
        if path is None:
            draw_weights(loading.saved_tensors(model.lm), args.seed)
        else:
            loading.fill(model.lm, path, known)
        model.eval()
        return (
            WorkingCopy(model, self.compute_dtype) if alone and self.compute_dtype != torch.float32 else None
        )

    def _compiles(self) -> bool:
        """Decide whether layers are compiled: by default on GPUs, for wide layers.

        Not compiled: tensor-parallel matrices (DTensors), families whose batches of documents differ in
        shape, and experts that our operator does not cover, whose routers are watched from outside.
        """
        if self.args.compile is not None:
            return self.args.compile
        config = self.model.lm.config.get_text_config()
        lm = self.model.lm
        varies = families.needs_whole_documents(lm) or vision.family_of(lm.config) is not None
        varies = varies or not grouped_experts.covers(lm)
        alone = self.mesh.tensor is None and self.mesh.context_group is None
        # A minute of compiling pays only where a layer keeps the GPU busy.
        return (
            self.device.type == "cuda" and alone and not varies and config.hidden_size >= _COMPILE_FROM_WIDTH
        )

    # -- passes ----------------------------------------------------------------------------------------------

    def _outputs(self, mbs: list[MicroBatch], weights: str, **options: Any) -> dict[str, list[Tensor]]:
        """Return each kind of output by sample, in the order of the batch, from passes without gradients."""
        with self._holding(weights) as model, torch.no_grad():
            sent = [self._send(mb, model) for mb in mbs]
            live = weights not in ("ref", "teacher")
            outputs = [self._forward(mb, share, model=model, live=live, **options) for mb, share in sent]
            return by_sample(mbs, [out.on_cpu() for out in outputs])

    def _accumulate(
        self, mbs: list[MicroBatch], loss: Loss, denominators: Denominators, place: StepPlace | None
    ) -> tuple[dict[str, float], float]:
        # FSDP averages gradients over the ranks that share parameters; the loss is a sum over them.
        scale = self.layout.dp_size * self.layout.cp_size / denominators.value
        scale *= 1.0 if self.loss_scale is None else self.loss_scale.size
        sums: dict[str, Tensor] = {}
        # The model stays in evaluation mode: engines have no dropout, so the policy trains without it.
        with self._working():
            # All inputs are copied before the loop, in which the host never waits for the device.
            for mb, share in [self._send(mb, self.model, loss) for mb in mbs]:
                copies = None if share is None else share.copies
                # An expert with tokens of such micro-batches only would have no gradient instead of 0.
                learns = mb.learns or self.has_experts
                with self.experts.listening(mb, copies), torch.set_grad_enabled(learns):
                    out = self._forward(
                        mb, share, entropy=loss.needs_entropy, logits=loss.needs_logits, at_head=loss.at_head
                    )
                    value, metrics = loss.fn(out, mb)
                if learns:
                    torch.autograd.backward(value * scale)
                else:
                    reshard(self.model)
                for name, metric in metrics.items():
                    sums[name] = sums[name] + metric if name in sums else metric
        if self.loss_scale is not None and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.size)
        reduced, grad_norm = self._reduce(sums, denominators)
        if (counts := self.experts.take()) is not None:
            if self.mesh.shard.size() > 1:
                dist.all_reduce(counts, group=self.mesh.token_group)
            reduced |= load_metrics(counts)
        return reduced, grad_norm

    def _finish_step(
        self, loss: Loss, denominators: Denominators, metrics: dict[str, float], grad_norm: float
    ) -> StepStats:
        try:
            scale = self.loss_scale
            if scale is None or not all(map(math.isfinite, metrics.values())):
                return super()._finish_step(loss, denominators, metrics, grad_norm)
            size = scale.size
            if not scale.update(grad_norm):
                stats = super()._finish_step(loss, denominators, metrics, grad_norm)
                return replace(stats, loss_scale=size)
            if self.rank == 0:
                logger.warning(
                    "Optimizer step %d (%s) was skipped: its gradient overflowed in fp16 at loss scale %g. "
                    "Weights are as before; the next step uses %g. train/skipped_steps counts such steps.",
                    *(self.step, self.role, size, scale.size),
                )
            rates = (learning_rate(self.args, self.step, self.decay_steps),) * len(
                self.optimizer.param_groups
            )
            return StepStats(metrics, 0.0, rates, applied=False, loss_scale=size, overflowed=True)
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _send(
        self, mb: MicroBatch, model: PackedLM, loss: Loss | None = None
    ) -> tuple[MicroBatch, Share | None]:
        """Send the micro-batch to the device, with the stream that replaces its own, if there is one: samples
        share prefixes in it, or it is this rank's part under context parallelism.
        """
        # The use of experts is counted over all tokens.
        counted = self.has_experts
        if self.replay is not None and mb.positions:
            self.replay.check(mb)
        shares = self._shares_prefixes(mb, model, loss)
        prefixes = PrefixShare.of(mb, all_tokens=counted) if shares else None
        if model is self.model and mb.positions:
            rows = mb.logit_positions if prefixes is None else prefixes.rows
            backward = loss is not None and (mb.learns or counted)
            self._count_pass((prefixes or mb).position_ids, len(rows), backward=backward)
        group, mb = self.mesh.context_group, vision.with_images(mb, model.lm.config)
        if group is None:
            sent = mb.to(self.device)
            return sent, None if prefixes is None else prefixes.to(self.device)
        after = isinstance(model, PackedScalarLM) and bool(model.offset)
        share = StreamShare.of(mb, self.layout.cp_size, self.layout.cp_rank, group, after_token=after)
        return mb.to(self.device), share.to(self.device)

    def _shares_prefixes(self, mb: MicroBatch, model: PackedLM, loss: Loss | None) -> bool:
        """Return whether samples share prefixes; they cannot if a loss reads the logits of every token."""
        looked_at = loss is not None and loss.needs_logits
        plain = not mb.media and mb.routed_experts is None and isinstance(model, PackedCausalLM)
        wanted = self.args.share_prefix is not False and self.mesh.context_group is None
        return wanted and plain and not looked_at and families.can_share_prefixes(model.lm)

    def _forward(
        self,
        mb: MicroBatch,
        share: Share | None,
        *,
        model: PackedLM | None = None,
        live: bool = True,
        **options: Any,
    ) -> TokenOutputs:
        """`live`: with the weights that are trained or were, which follow the engine's experts."""
        model = model or self.model
        if self.replay is not None:
            chosen = mb.routed_experts if share is None else share.experts
            self.replay.follow(chosen if live else None)
        if isinstance(model, PackedScalarLM):
            return TokenOutputs.of_scalar_head(model(mb, share)[0])
        log_probs, entropies, full, extra = model(
            mb,
            share,
            temperature=self.args.rollout_temperature,
            chunk_size=self.args.log_probs_chunk_size,
            **options,
        )
        return TokenOutputs(log_probs=log_probs, entropy=entropies, logits=full, extra=extra)

    @contextmanager
    def _holding(self, weights: str) -> Iterator[PackedLM]:
        """Yield the model with the weights tagged `weights`, for passes without gradients."""
        if weights == "teacher" and self.teacher is not None:
            self.teacher.to(self.device)
            yield self.teacher
            reshard(self.teacher)
            self.teacher.to("cpu")
            return
        with self.copies.active(weights), self._working():
            try:
                yield self.model
            finally:
                reshard(self.model)

    def _working(self) -> AbstractContextManager[None]:
        """Run passes in this block: on the 16-bit copy of the weights if nothing is sharded."""
        return self.working.active() if self.working is not None else nullcontext()

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _square_of_gradients(self) -> Tensor:
        """Return this rank's part of the squared gradient norm; shared parameters count once."""
        gradients = self._gradients()
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        if self.mesh.tensor is not None:
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            shares = [1.0 if tensor_parallel.is_cut(p) else 1.0 / self.layout.tp_size for p in parameters]
            squares = squares * torch.tensor(shares, dtype=torch.float64, device=squares.device)
        return squares.sum().to(self.device) / self.mesh.num_replicas

    def _reduce(self, sums: dict[str, Tensor], denominators: Denominators) -> tuple[dict[str, float], float]:
        """Return metrics of the step and the global gradient norm, in one collective and one transfer."""
        names = sorted(sums)
        # Ranks of one replica hold the same metrics: each contributes its share to the sum over all ranks.
        alike = self.layout.cp_size * self.layout.tp_size
        values = torch.stack([*(sums[name].double() / alike for name in names), self._square_of_gradients()])
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        *totals, square = values.tolist()
        metrics = {name: total / denominators.value for name, total in zip(names, totals, strict=True)}
        return metrics, math.sqrt(square) if square >= 0 else math.nan

    def _apply(self, grad_norm: float) -> None:
        if self.args.clip_grad and grad_norm > self.args.clip_grad:
            torch._foreach_mul_(self._gradients(), self.args.clip_grad / (grad_norm + 1e-6))
        self.optimizer.step()

    def _forget_moments(self) -> None:
        self.optimizer.state.clear()

    # -- weights ---------------------------------------------------------------------------------------------

    def _read_hf(self, path: str | Path) -> None:
        path = weights_source(path, self.model.lm.config, self.hf_checkpoint)
        dcp_checkpoint.load_hf_weights(self.model.lm, path)

    def _build_teacher(self, path: str | Path) -> bool:
        source = loading.empty_model(path)
        self.check_vocabulary("--opd-teacher-load", path, source.config)
        if dcp_checkpoint.fingerprint(source) == dcp_checkpoint.fingerprint(self.model.lm):
            return False
        self.teacher = PackedCausalLM(source).requires_grad_(False)
        shard(self.teacher, self.mesh.shard, self.compute_dtype)
        loading.allocate(self.teacher, torch.device("cpu"))
        loading.fill(source, path)
        self.teacher.eval()
        return True

    def output_matrix(self, weights: str) -> WholeMatrix:
        """Return the whole output matrix [V, H] of the weights tagged `weights`, in the passes' dtype."""
        with self._holding(weights) as model:
            matrix = gather_full(model.lm.get_output_embeddings().weight.detach())
            return WholeMatrix(matrix.to(self.device, self.compute_dtype, copy=True))

    def _buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        return hf_export.buckets(self.model.lm, bucket_bytes, dtype, scalar=self.is_scalar)

    def export_stage(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        # There is a single pipeline stage.
        return self.export(dtype)

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        named = lora.adapter_tensors(self.model.lm)
        return hf_export.in_buckets(named, self.args.update_weight_buffer_size, dtype)

    def _adapter_names(self) -> Iterable[str]:
        return [name for name, _ in self.model.lm.named_parameters() if lora.is_adapter(name)]

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _manifest(self) -> dict[str, Any]:
        found = {"model": dcp_checkpoint.fingerprint(self.model.lm), "world_size": self.layout.dp_size}
        return found if self.loss_scale is None else found | {"loss_scale": self.loss_scale.state}

    def _check_model(self, path: Path) -> dict[str, Any]:
        manifest = read_manifest(path)
        dcp_checkpoint.check_same_model(manifest["model"], dcp_checkpoint.fingerprint(self.model.lm), path)
        return manifest

    def _save_state(self, path: Path, *, with_optimizer: bool) -> None:
        dcp_checkpoint.save(self, path, with_optimizer=with_optimizer)

    def _load_state(self, path: Path, manifest: dict[str, Any], *, with_optimizer: bool) -> None:
        dcp_checkpoint.load(self, path, with_optimizer=with_optimizer)
        if self.loss_scale is not None and with_optimizer and "loss_scale" in manifest:
            self.loss_scale = LossScale(manifest["loss_scale"])

    def _save_weights(self, path: Path) -> None:
        dcp_checkpoint.save_weights(self, path)

    def _load_weights(self, path: Path) -> None:
        dcp_checkpoint.load(self, path, with_optimizer=False)

    def _finish_own_save(self, wait: bool) -> bool:
        if self.pending_save is not None and (wait or self.pending_save.done()):
            pending, self.pending_save = self.pending_save, None
            with plain_errors():
                pending.result()
        return self.pending_save is None

    def _move_parameters(self, device: torch.device) -> None:
        if self.args.fsdp_cpu_offload:
            return
        self._host.move_model(self.model, device)
        if self.working is not None:
            self.working.drop()

    def _move_optimizer(self, device: torch.device) -> None:
        if isinstance(self.optimizer, PlacedAdamW):
            self.optimizer.move(device, self._host)
        elif not self.args.fsdp_cpu_offload:
            self._host.move_state(self.optimizer, device)


def build_optimizer(args: Args, lm: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups: matrices with weight decay; vectors (norms, biases) without. Muon has a third."""
    trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
    hidden = hidden_matrices(lm) if args.optimizer == "muon" else []
    chosen = {id(parameter) for parameter in hidden}
    others = [parameter for parameter in trained if id(parameter) not in chosen]
    matrices, vectors = ([p for p in others if (p.ndim > 1) is matrix] for matrix in (True, False))
    decays = ((matrices, args.weight_decay), (vectors, 0.0))
    groups: list[dict[str, Any]] = [{"params": own, "weight_decay": decay} for own, decay in decays if own]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr)
    betas = (args.adam_beta1, args.adam_beta2)
    settings: dict[str, Any] = {"lr": args.lr, "betas": betas, "eps": args.adam_eps}
    plan = MomentPlan.of(args)
    if hidden:
        return Muon({"params": hidden, "weight_decay": args.weight_decay}, groups, **settings)
    if not plan.is_plain:
        return PlacedAdamW(groups, plan, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)
