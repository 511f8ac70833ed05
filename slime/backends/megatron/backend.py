"""The Megatron trainer: log-prob passes, optimizer steps, checkpoints and weight export of one rank."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor

from slime.algorithms.expert_balance import load_metrics
from slime.arguments import Args
from slime.backends.base import (
    Bucket,
    Denominators,
    HeadFunction,
    Loss,
    MicroBatch,
    NonFiniteStepError,
    StepPlace,
    StepStats,
    TokenLists,
    TokenOutputs,
    has_update,
)
from slime.backends.megatron import dist_checkpoint, hooks
from slime.backends.megatron import optimizer as optimizer_module
from slime.backends.megatron.builder import build_chunks, wrap_for_training
from slime.backends.megatron.compiled import compile_layers, should_compile
from slime.backends.megatron.config import (
    check_heads,
    check_layout,
    ddp_config,
    dims_of,
    optimizer_config,
    read_hf_config,
    refuse_unknown_fields,
    rotary_embedding,
    same_architecture,
    transformer_config,
)
from slime.backends.megatron.families import family_of
from slime.backends.megatron.groups import current_layout, from_last_stage, init_groups
from slime.backends.megatron.model import ModelCall
from slime.backends.megatron.passes import Passes, outputs_on, outputs_on_cpu
from slime.backends.megatron.random_weights import draw_weights
from slime.backends.megatron.routing import (
    Recorded,
    RoutingPlan,
    balance_coefficient,
    routers_of,
    take_metrics,
)
from slime.backends.megatron.te_attention import choose_attention
from slime.backends.megatron.teacher import FrozenModel, output_matrix_of
from slime.backends.megatron.trainable import freeze
from slime.backends.megatron.vocab_parallel import VocabSlice
from slime.backends.megatron.weights import HubWeights
from slime.backends.shared import hf_folder
from slime.backends.shared.checkpoint_errors import plain_errors
from slime.backends.shared.microbatch import split_by_sample
from slime.backends.shared.optimizer import learning_rate, set_rate
from slime.backends.shared.roles import load_copies, load_critic, save_copies
from slime.backends.shared.trainer_folder import check_content, is_checkpoint
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.batch.flops import ModelShape, total_forward_flops
from slime.utils import accelerator


class MegatronBackend:
    """One rank's part of the model and its optimizer. Every public method is called by all ranks together."""

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        total_steps: int | None = None,
        random_weights: bool = False,
        role: str = "actor",
    ) -> None:
        self.args, self.role = args, role
        self.critic: MegatronBackend | None = None  # set by create_backend: a second model on the same ranks
        self.teacher: FrozenModel | None = (
            None  # a teacher of another shape; one of the same is a tagged copy
        )
        self.rank = rank
        self.device = device
        self.decay_steps = args.lr_decay_iters or total_steps
        self.step = 0  # optimizer steps taken
        self.compute_dtype = accelerator.compute_dtype(args.dtype, device)
        self.hf_config = read_hf_config(args.hf_checkpoint)
        refuse_unknown_fields(args.megatron_config or {})
        check_layout(args, self.hf_config, world_size=world_size, device=device)
        check_heads(args, self.hf_config)
        if role == "actor":
            init_groups(args, device)
            hooks.after_init(args)
        self.layout = current_layout()
        self.config = transformer_config(args, self.hf_config, self.compute_dtype, device)
        self.is_scalar = role == "critic" or args.loss_type == "rm_loss"
        chunks = build_chunks(
            self.config,
            self.hf_config,
            device,
            attention=choose_attention(args, self.config, device),
            scalar=self.is_scalar,
            provider=args.custom_model_provider_path,
        )
        self.hub = HubWeights(
            chunks,
            family_of(self.hf_config),
            dims_of(self.hf_config, self.config),
            tied=bool(self.hf_config.tie_word_embeddings),
            scalar_seed=args.seed if self.is_scalar else None,
        )
        freeze(args, self.hub.entries)
        # Before the optimizer: its fp32 copies are taken from the parameters.
        if random_weights:
            draw_weights(chunks, args.seed)
        else:
            self.hub.load(args.hf_checkpoint)
        if should_compile(args, self.config, device):
            compile_layers(chunks, self.config, device)
        self.model = wrap_for_training(self.config, ddp_config(args), chunks)
        self.optimizer_config = optimizer_config(args, self.compute_dtype)
        self.optimizer = optimizer_module.build_optimizer(
            self.optimizer_config, self.model, cpu=device.type == "cpu"
        )
        self.passes = Passes(
            self.model,
            self.config,
            rotary_embedding(self.hf_config).to(device),
            self.layout,
            device,
            after_token=self.is_scalar and role != "critic",
        )
        # With --overlap-param-gather forward passes gather what the last step left:
        # on from one training pass to the next.
        self._gathers_late = args.overlap_param_gather
        self.copies = WeightCopies(self._settled_parameters, on_device=args.weight_copies == "device")
        self.routers = routers_of(self.model)
        self._recorded: dict[
            tuple[int, ...], Recorded
        ] = {}  # experts chosen in the last pass of the old policy
        self.saves = AsyncCallsQueue()  # with --async-save: what is being written
        self._away: dict[int, tuple[Tensor | None, int]] = {}  # flat buffers that left the device

    def _settled_parameters(self) -> list[Tensor]:
        self._settle()
        return [p.data for chunk in self.model for p in chunk.parameters()] + self.hub.buffers

    def _settle(self) -> None:
        """Gather updated parameters now, and let passes take them as they are:
        whoever reads or swaps weights calls this.
        """
        if self._gathers_late:
            self._gathers_late = False
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=True)

    # -- passes ----------------------------------------------------------------------------------------------

    def log_probs(
        self,
        mbs: list[MicroBatch],
        *,
        weights: str = LIVE,
        entropy: bool = False,
        at_head: HeadFunction | None = None,
    ) -> TokenLists:
        """Log-probs (and entropies) of every response token under the
        weights tagged `weights`, on every rank.
        """
        # Experts belong to the policy: a reference or a teacher chooses its own.
        routing = RoutingPlan() if weights in ("ref", "teacher") else self._plan_recording()
        hooks.before_log_prob(self.args, self.model, weights)
        found = self._forward(mbs, weights, self._call(entropy=entropy, at_head=at_head), routing)
        return TokenLists(found["log_probs"], found.get("entropy"), found.get("extra"))

    def values(self, mbs: list[MicroBatch]) -> list[Tensor]:
        """The critic's value of every response token, [R_i] fp32 on the CPU, on every rank."""
        assert self.critic is not None, "this run has no critic"
        return self.critic._forward(mbs, LIVE, self._call(), RoutingPlan())["values"]

    def _plan_recording(self) -> RoutingPlan:
        if self.args.use_rollout_routing_replay:
            return RoutingPlan(follow_engine=True)
        self._recorded = {}
        return RoutingPlan(record=self._recorded if self.args.use_routing_replay else None)

    def _plan_training(self, mbs: list[MicroBatch], role: str) -> RoutingPlan:
        tokens = torch.tensor(sum(mb.input_ids.shape[1] for mb in mbs if mb.positions), dtype=torch.float64)
        total = max(float(self.sum_over_ranks(tokens)), 1.0) if self.routers else 1.0
        replay = self._recorded if self._recorded and role == "actor" else None
        follow = self.args.use_rollout_routing_replay and role == "actor"
        return RoutingPlan(step_tokens=total, follow_engine=follow, replay=replay)

    def _forward(
        self, mbs: list[MicroBatch], weights: str, call: ModelCall, routing: RoutingPlan
    ) -> dict[str, list[Tensor]]:
        """Each kind of output by sample, in the order of the batch, from passes without gradients."""
        self._settle()
        if weights == "teacher" and self.teacher is not None:
            outputs = self.teacher.forward(mbs, call)
        else:
            with self.copies.active(weights), torch.no_grad():
                outputs = self.passes.forward(mbs, call, routing)
        found: dict[str, dict[int, Tensor]] = {}
        for mb, results in zip(mbs, from_last_stage(outputs), strict=True):
            for name, flat in results.items():
                # zip stops at once for a micro-batch of weight zero: it has no positions.
                found.setdefault(name, {}).update(zip(mb.positions, split_by_sample(flat, mb), strict=False))
        return {name: [values[p] for p in sorted(values)] for name, values in found.items()}

    def train_step(
        self,
        mbs: list[MicroBatch],
        loss: Loss,
        denominators: Denominators,
        *,
        model: str = "actor",
        place: StepPlace | None = None,
    ) -> StepStats:
        """One optimizer step over all micro-batches; raises without
        applying it when a number is not finite.
        """
        if model == "critic":
            assert self.critic is not None, "this run has no critic"
            return self.critic.train_step(mbs, loss, denominators)
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
            if self.args.overlap_param_gather and not self._gathers_late:
                chunk.enable_forward_pre_hook()
        self._gathers_late = self.args.overlap_param_gather
        self.optimizer.zero_grad()
        if self.role == "actor" and place is not None:
            rates = hooks.Schedule(self.args, self.step, self.decay_steps)
            hooks.before_train_step(self.args, place, self.model, self.optimizer, rates)
        sums: dict[str, Tensor] = {}
        seen: list[dict[str, Tensor]] = []

        def loss_of(out: TokenOutputs, mb: MicroBatch) -> Tensor:
            value, metrics = loss.fn(out, mb)
            for name, metric in metrics.items():
                sums[name] = sums[name] + metric if name in sums else metric
            if self.layout.pp_size > 1:
                seen.append(outputs_on_cpu(out))
            return value / denominators.value

        call = self._call(entropy=loss.needs_entropy, logits=loss.needs_logits, at_head=loss.at_head)
        call = replace(call, heads_scale=self._heads_scale(mbs))
        self.passes.backward(mbs, call, loss_of, self._plan_training(mbs, self.role))
        self._repeat_on_other_stages(mbs, loss, seen)
        for chunk in self.model:
            chunk.eval()
        metrics = (
            self._reduce(sums, denominators) | self._expert_metrics() | self._heads_metrics(call.heads_scale)
        )
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        self._check_finite(metrics, grad_norm)
        started = time.perf_counter()
        rates = set_rate(self.optimizer, learning_rate(self.args, self.step, self.decay_steps))
        applied = has_update(loss, denominators, metrics, grad_norm)
        if applied:
            optimizer_module.step(self.optimizer, grad_norm, self.args.clip_grad)
            self.step += 1
        return StepStats(metrics, grad_norm, rates, time.perf_counter() - started, applied)

    @torch.no_grad()
    def _repeat_on_other_stages(
        self, mbs: list[MicroBatch], loss: Loss, seen: list[dict[str, Tensor]]
    ) -> None:
        """What a loss records about tokens it records on every stage, from the last stage's results."""
        if self.layout.pp_size == 1 or loss.needs_logits:
            return
        results = from_last_stage(seen)
        if self.layout.pp_rank < self.layout.pp_size - 1:
            for mb, found in zip(mbs, results, strict=False):
                loss.fn(outputs_on(found, self.device), mb.to(self.device))

    def _call(self, **options: Any) -> ModelCall:
        return ModelCall(
            temperature=self.args.rollout_temperature,
            chunk_size=self.args.log_probs_chunk_size,
            memory_gib=self.args.logits_memory_gib,
            **options,
        )

    def _heads_scale(self, mbs: list[MicroBatch]) -> float:
        """What one token counts in the loss of heads that predict further
        tokens: their share over the step's tokens.
        """
        if not self.config.mtp_num_layers:
            return 0.0
        tokens = sum((mb.loss_mask.sum().double() for mb in mbs), torch.zeros((), dtype=torch.float64))
        return self.config.mtp_loss_scaling_factor / max(float(self.sum_over_ranks(tokens)), 1.0)

    def _heads_metrics(self, scale: float) -> dict[str, float]:
        if not scale:
            return {}
        losses = self.model[-1].module.heads_losses
        total = self.sum_over_ranks(
            torch.stack([torch.zeros((), device=self.device), *losses]).double().sum()
        )
        losses.clear()
        return {"mtp_loss": from_last_stage(float(total)) * scale / self.config.mtp_loss_scaling_factor}

    def _reduce(self, sums: dict[str, Tensor], denominators: Denominators) -> dict[str, float]:
        """Metrics over the whole step, on every rank. Context- and
        tensor-parallel ranks computed the same ones.
        """
        names = sorted(sums)
        values: list[float] = []
        if names:
            values = self.sum_over_ranks(torch.stack([sums[name].double() for name in names])).tolist()
        names, values = from_last_stage((names, values))
        return {name: value / denominators.value for name, value in zip(names, values, strict=True)}

    def _expert_metrics(self) -> dict[str, float]:
        """How evenly the experts were used, and the losses of the routers where they are on."""
        if self.config.num_moe_experts is None:
            return {}
        counts, losses = take_metrics(self.routers, self.config.num_moe_experts)
        asked = {"moe_aux_loss": balance_coefficient(self.config), "moe_z_loss": self.config.moe_z_loss_coeff}
        return load_metrics(counts) | {name: value for name, value in losses.items() if asked[name]}

    def _check_finite(self, metrics: dict[str, float], grad_norm: float) -> None:
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not bad and math.isfinite(grad_norm):
            return
        raise NonFiniteStepError(
            f"optimizer step {self.step} was not applied: {', '.join([*bad, f'grad_norm={grad_norm}'])}. "
            "The weights are "
            "those before the step; lower --lr or look for extreme log-probs or rewards in this batch."
        )

    def reset_optimizer(self) -> None:
        """Forget the moments of actor and critic; the schedules go on."""
        for member in optimizer_module.members(self.optimizer):
            member.optimizer.state.clear()
        if self.critic is not None:
            self.critic.reset_optimizer()

    def output_matrix(self, weights: str) -> VocabSlice | None:
        """This rank's rows of the output matrix of the weights tagged
        `weights`, a copy; None where no head is.
        """
        if weights == "teacher" and self.teacher is not None:
            return self.teacher.output_matrix()
        self._settle()
        with self.copies.active(weights):
            return output_matrix_of([chunk.module for chunk in self.model], self.device)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over the data-parallel ranks, the same on all of them."""
        if self.layout.dp_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        return values

    def forward_flops(self, lengths: list[int]) -> float:
        """This rank's share of one forward pass over its replica's
        documents: all ranks of a replica work on them.
        """
        ranks = self.layout.tp_size * self.layout.pp_size * self.layout.cp_size
        return total_forward_flops(ModelShape.from_hf_config(self.hf_config), lengths) / ranks

    # -- weights ---------------------------------------------------------------------------------------------

    def load_hf(self, path: str | Path, *, weights: str = LIVE) -> None:
        """Read the weights of an HF folder into the live model or under another tag."""
        self._settle()
        with self._keep_live(weights):
            self.hub.load(path)
            self.copies.copy(LIVE, weights)
        if weights == LIVE:
            self.optimizer.reload_model_params()

    def load_model(self, path: str | Path, *, weights: str) -> None:
        """Read an HF folder, or a checkpoint of this same model, into the weights tagged `weights`."""
        if not is_checkpoint(path):
            self.load_hf(path, weights=weights)
            return
        check_content(Path(path), self.args)
        self._settle()
        with self._keep_live(weights):
            dist_checkpoint.check_model(self, Path(path))
            dist_checkpoint.load_weights(self, Path(path) / dist_checkpoint.STATE)
            self.copies.copy(LIVE, weights)

    def load_teacher(self, path: str | Path) -> None:
        """Keep the model of the HF folder `path` under the tag
        "teacher"; its vocabulary must be the policy's.
        """
        if is_checkpoint(path):
            self.load_model(path, weights="teacher")
            return
        theirs = read_hf_config(str(path))
        if theirs.vocab_size != self.hf_config.vocab_size:
            raise ValueError(
                f"--opd-teacher-load {path} has {theirs.vocab_size} tokens in its vocabulary, "
                f"--hf-checkpoint has {self.hf_config.vocab_size}: a teacher scores the policy's own "
                "tokens, so both must share one tokenizer; choose a teacher of the same family."
            )
        if same_architecture(theirs, self.hf_config):
            self.load_hf(path, weights="teacher")
        else:
            self.teacher = FrozenModel(self.args, path, self.layout, self.compute_dtype, self.device)

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
        if dst == LIVE:
            self.optimizer.reload_model_params()

    def has_weights(self, tag: str) -> bool:
        return tag in self.copies

    def export(
        self, dtype: torch.dtype | None = None, *, weights: str = LIVE, bucket_bytes: int | None = None
    ) -> Iterator[Bucket]:
        """Buckets of (hub name, full tensor); a collective. Tensors are valid until the next bucket."""
        self._settle()
        with self.copies.active(weights):
            yield from self.hub.buckets(bucket_bytes or self.args.update_weight_buffer_size, dtype)

    def export_stage(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """`export` of this rank's pipeline stage alone, on its ranks alone."""
        self._settle()
        return self.hub.stage_buckets(self.args.update_weight_buffer_size, dtype)

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        raise NotImplementedError("this trainer has no adapters: flags refuse --lora-rank with it")

    def adapter_config(self) -> dict[str, Any]:
        raise NotImplementedError("this trainer has no adapters: flags refuse --lora-rank with it")

    def save_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write an HF folder that `from_pretrained` reads, with the tokenizer
        of --hf-checkpoint; whole or not at all.
        """
        dtype = dtype or self.hf_config.dtype or torch.float32
        source = self.args.hf_checkpoint
        buckets = self.export(dtype)
        if self.rank == 0 and not self.is_scalar:
            # The rank that writes adds what came with the checkpoint and is no part of the model.
            buckets = chain(buckets, self.hub.untrained(source, self.args.update_weight_buffer_size, dtype))
        hf_folder.save(buckets, Path(path), source, dtype, self.rank, scalar=self.is_scalar)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> dict[str, Any]:
        """Write weights, optimizer (unless --no-save-optim), schedule position
        and random state into the folder `path`.

        A critic has a folder of its own in it, and so have copies that move.
        """
        self._settle()
        if self.critic is not None:
            self.critic.save(Path(path) / "critic")
        save_copies(
            self.args, self.copies, Path(path), lambda folder: dist_checkpoint.save_weights(self, folder)
        )
        return dist_checkpoint.save(self, Path(path), with_optimizer=not self.args.no_save_optim)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether all that `save` was given is on disk; `wait`: until it is."""
        done = self.critic is None or self.critic.finish_save(wait=wait)
        with plain_errors():
            self.saves.maybe_finalize_async_calls(blocking=wait)
        return done and self.saves.get_num_unfinalized_calls() == 0

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a folder written by `save`, also under another layout; with --finetune only its weights."""
        self._settle()
        if self.critic is not None:
            load_critic(self.critic, self.args, Path(path))
        load_copies(
            self.args, self.copies, Path(path), lambda folder: dist_checkpoint.load_weights(self, folder)
        )
        return dist_checkpoint.load(self, Path(path), weights_only=self.args.finetune)

    def move(
        self, *, params: str | torch.device | None = None, optimizer: str | torch.device | None = None
    ) -> None:
        """Put parameters and optimizer state on a device; None leaves
        them where they are. Nothing to do on CPU.
        """
        if self.device.type == "cpu":
            return
        if self.critic is not None:
            # A push needs the actor alone: the critic's weights come only for training, with the optimizers.
            self.critic.move(params=optimizer if params is not None else None, optimizer=optimizer)
        if params is not None:
            self._settle()
            for chunk in self.model:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    optimizer_module.move_buffer(buffer, torch.device(params), self._away)
        if optimizer is not None:
            optimizer_module.move_state(self.optimizer, torch.device(optimizer))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
