"""The Megatron trainer: log-prob passes, optimizer steps, checkpoints and weight export of one rank."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor, nn

from slime.algorithms.expert_balance import load_metrics
from slime.arguments import Args
from slime.backends.base import (
    Bucket,
    Denominators,
    Loss,
    MicroBatch,
    StepPlace,
    TokenOutputs,
)
from slime.backends.families import dims_of, family_of
from slime.backends.megatron import dist_checkpoint, hooks
from slime.backends.megatron import optimizer as optimizer_module
from slime.backends.megatron.config import (
    check_layout,
    check_mtp,
    ddp_config,
    optimizer_config,
    read_hf_config,
    rotary_embedding,
    same_architecture,
    transformer_config,
)
from slime.backends.megatron.megatron_groups import current_layout, from_last_stage, init_groups
from slime.backends.megatron.modules import lora
from slime.backends.megatron.modules.builder import build_chunks, wrap_for_training
from slime.backends.megatron.modules.compiled import compile_layers, should_compile
from slime.backends.megatron.modules.model import ModelCall
from slime.backends.megatron.modules.routing import (
    PackedRouter,
    RecordedByBatch,
    RoutingPlan,
    balance_coefficient,
    drain_metrics,
)
from slime.backends.megatron.modules.te_attention import choose_attention
from slime.backends.megatron.modules.vocab_parallel import VocabSlice
from slime.backends.megatron.passes import Passes
from slime.backends.megatron.teacher import TeacherModel, critic_args, output_matrix_of
from slime.backends.megatron.weights import HubWeights, SharedOut
from slime.backends.shared.checkpoint_errors import plain_errors
from slime.backends.shared.draw_weights import draw_weights
from slime.backends.shared.host_memory import HostMemory
from slime.backends.shared.microbatch import by_sample
from slime.backends.shared.placed_adam import MomentPlan
from slime.backends.shared.trainable import freeze
from slime.backends.shared.trainer_base import TrainBackend
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.backends.torch_dist.reading import weights_source


class MegatronBackend(TrainBackend):
    """One rank's part of the model and its optimizer. Every public method is called by all ranks together."""

    state_folder = "dist"

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        random_weights: bool = False,
        role: str = "actor",
    ) -> None:
        super().__init__(args, rank=rank, device=device, role=role)
        self.teacher: TeacherModel | None = None  # of another shape; else a tagged copy
        self.hf_config = read_hf_config(self.hf_checkpoint)
        check_layout(args, self.hf_config, world_size=world_size, device=device)
        check_mtp(args, self.hf_config)
        if role == "actor":
            init_groups(args, device)
            hooks.after_init(args)
        self.layout, self.data_group = current_layout(), parallel_state.get_data_parallel_group()
        self.config = transformer_config(args, self.hf_config, self.compute_dtype, device)
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
            dims_of(self.hf_config),
            tied=bool(self.hf_config.tie_word_embeddings),
            scalar_seed=args.seed if self.is_scalar else None,
        )
        entries = [entry for entry in self.hub.entries if isinstance(entry.parameter, nn.Parameter)]
        freeze(args, [(entry.hub, entry.parameter) for entry in entries])
        # Before the optimizer: its fp32 copies are taken from the parameters.
        if random_weights:
            draw_weights((pair for chunk in chunks for pair in chunk.named_parameters()), args.seed)
        else:
            self._fill(args.start_from)
        self.adapters: SharedOut | None = None  # with --lora-rank
        if args.lora_rank:
            self.adapters = lora.add_adapters(args, chunks, self.hub, dims_of(self.hf_config))
        self._set_costs(self.hf_config, [p for chunk in chunks for p in chunk.parameters()])
        if should_compile(args, self.config, device):
            compile_layers(chunks, self.config, device)
        self.model = wrap_for_training(self.config, ddp_config(args), chunks)
        self.optimizer_config = optimizer_config(args, self.compute_dtype)
        self.optimizer = optimizer_module.build_optimizer(
            self.optimizer_config, self.model, MomentPlan.of(args), cpu=device.type == "cpu"
        )
        self.passes = Passes(
            self.model,
            self.config,
            rotary_embedding(self.hf_config).to(device),
            self.layout,
            device,
            after_token=self.is_scalar and role != "critic",
        )
        # With --overlap-param-gather the next forward pass gathers what an optimizer step has updated.
        self._gathers_late = args.overlap_param_gather
        self.copies = WeightCopies(self._settled_parameters)
        modules = [module for chunk in self.model for module in chunk.modules()]
        self.routers = [module for module in modules if isinstance(module, PackedRouter)]
        self._recorded: RecordedByBatch = {}  # experts chosen in the last pass of the old policy
        self.saves = AsyncCallsQueue()  # with --async-save: what is being written
        self._host = HostMemory()
        self._away: dict[int, int] = {}  # flat buffers that left the device, and their sizes

    def _settled_parameters(self) -> list[Tensor]:
        self._settle()
        return [p.data for chunk in self.model for p in chunk.parameters()] + self.hub.buffers

    def _settle(self) -> None:
        """Gather the updated parameters now, before they are read or swapped."""
        if self._gathers_late:
            self._gathers_late = False
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=True)

    # -- passes ----------------------------------------------------------------------------------------------

    def _outputs(self, mbs: list[MicroBatch], weights: str, **options: Any) -> dict[str, list[Tensor]]:
        # Expert choices belong to the policy: a reference, a teacher or a critic makes its own.
        routing = RoutingPlan()
        if self.role == "actor":
            hooks.before_log_prob(self.args, self.model, weights)
            routing = routing if weights in ("ref", "teacher") else self._plan_recording()
        self._settle()
        if weights == "teacher" and self.teacher is not None:
            outputs = self.teacher.forward(mbs, self._call(**options))
        else:
            self._count(mbs, backward=False)
            with self.copies.active(weights), torch.no_grad():
                outputs = self.passes.forward(mbs, self._call(**options), routing)
        return by_sample(mbs, from_last_stage(outputs))

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

    def _accumulate(
        self, mbs: list[MicroBatch], loss: Loss, denominators: Denominators, place: StepPlace | None
    ) -> tuple[dict[str, float], float]:
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
            if self.args.overlap_param_gather and not self._gathers_late:
                chunk.enable_forward_pre_hook()
        self._gathers_late = self.args.overlap_param_gather
        self.optimizer.zero_grad()
        if self.role == "actor" and place is not None:
            schedule = hooks.LearningRateSchedule(self.args, self.step, self.decay_steps)
            hooks.before_train_step(self.args, place, self.model, self.optimizer, schedule)
        sums: dict[str, Tensor] = {}
        seen: list[dict[str, Tensor]] = []

        def loss_of(out: TokenOutputs, mb: MicroBatch) -> Tensor:
            value, metrics = loss.fn(out, mb)
            for name, metric in metrics.items():
                sums[name] = sums[name] + metric if name in sums else metric
            if self.layout.pp_size > 1:
                seen.append(out.on_cpu())
            return value / denominators.value

        call = self._call(entropy=loss.needs_entropy, logits=loss.needs_logits, at_head=loss.at_head)
        call = replace(call, mtp_scale=self._mtp_scale(mbs))
        self._count(mbs, backward=True)
        self.passes.backward(mbs, call, loss_of, self._plan_training(mbs, self.role))
        self._repeat_on_other_stages(mbs, loss, seen)
        for chunk in self.model:
            chunk.eval()
        # Before the host waits for metrics: it builds lists of all parameters while passes still run.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        metrics = self._reduce(sums, denominators) | self._expert_metrics()
        metrics |= self._mtp_metrics(call.mtp_scale)
        return metrics, grad_norm

    def _apply(self, grad_norm: float) -> None:
        optimizer_module.step(self.optimizer, grad_norm, self.args.clip_grad)

    @torch.no_grad()
    def _repeat_on_other_stages(
        self, mbs: list[MicroBatch], loss: Loss, seen: list[dict[str, Tensor]]
    ) -> None:
        """Call the loss on the other pipeline stages too, so that they record the same values."""
        if self.layout.pp_size == 1 or loss.needs_logits:
            return
        results = from_last_stage(seen)
        if self.layout.pp_rank < self.layout.pp_size - 1:
            for mb, found in zip(mbs, results, strict=False):
                loss.fn(TokenOutputs.of_known(found, self.device), mb.to(self.device))

    def _call(self, **options: Any) -> ModelCall:
        return ModelCall(
            temperature=self.args.rollout_temperature,
            chunk_size=self.args.log_probs_chunk_size,
            **options,
        )

    def _mtp_scale(self, mbs: list[MicroBatch]) -> float:
        """Return the weight of one token in the loss of the MTP heads: their factor / tokens of the step."""
        if not self.config.mtp_num_layers:
            return 0.0
        tokens = sum((mb.loss_mask.sum().double() for mb in mbs), torch.zeros((), dtype=torch.float64))
        return self.config.mtp_loss_scaling_factor / max(float(self.sum_over_ranks(tokens)), 1.0)

    def _mtp_metrics(self, scale: float) -> dict[str, float]:
        if not scale:
            return {}
        losses = self.model[-1].module.mtp_losses
        total = torch.stack([torch.zeros((), device=self.device), *losses]).double().sum()
        total = self.sum_over_ranks(total)
        losses.clear()
        return {"mtp_loss": from_last_stage(float(total)) * scale / self.config.mtp_loss_scaling_factor}

    def _reduce(self, sums: dict[str, Tensor], denominators: Denominators) -> dict[str, float]:
        """Metrics of the whole step; context- and tensor-parallel ranks have computed the same ones."""
        names = sorted(sums)
        values: list[float] = []
        if names:
            values = self.sum_over_ranks(torch.stack([sums[name].double() for name in names])).tolist()
        names, values = from_last_stage((names, values))
        return {name: value / denominators.value for name, value in zip(names, values, strict=True)}

    def _expert_metrics(self) -> dict[str, float]:
        """Return metrics of the balance of experts, and the router losses that are enabled."""
        if self.config.num_moe_experts is None:
            return {}
        counts, losses = drain_metrics(self.routers, self.config.num_moe_experts)
        asked = {"moe_aux_loss": balance_coefficient(self.config), "moe_z_loss": self.config.moe_z_loss_coeff}
        return load_metrics(counts) | {name: value for name, value in losses.items() if asked[name]}

    def _forget_moments(self) -> None:
        for member in optimizer_module.members(self.optimizer):
            member.optimizer.state.clear()

    def output_matrix(self, weights: str) -> VocabSlice | None:
        """Return a copy of this rank's rows of the output matrix; None on a pipeline stage without it."""
        if weights == "teacher" and self.teacher is not None:
            return self.teacher.output_matrix()
        self._settle()
        with self.copies.active(weights):
            return output_matrix_of([chunk.module for chunk in self.model], self.device)

    def _count(self, mbs: list[MicroBatch], *, backward: bool) -> None:
        """Count the operations of micro-batches that are about to run; those of weight zero count nothing."""
        for mb in mbs:
            if mb.positions:
                self._count_pass(mb.position_ids, len(mb.logit_positions), backward=backward)

    # -- weights ---------------------------------------------------------------------------------------------

    def load_hf(self, path: str | Path, *, weights: str = LIVE) -> None:
        super().load_hf(path, weights=weights)
        if weights == LIVE:
            optimizer_module.reload_copies(self.optimizer)

    def _read_hf(self, path: str | Path) -> None:
        self._settle()
        self._fill(path)

    def _fill(self, path: str | Path) -> None:
        self.hub.load(weights_source(path, self.hf_config, self.hf_checkpoint), self.hf_config)

    @classmethod
    def settings_of_critic(cls, args: Args) -> Args:
        settings = super().settings_of_critic(args)
        return settings if settings.hf_checkpoint == args.hf_checkpoint else critic_args(settings)

    def _build_teacher(self, path: str | Path) -> bool:
        theirs = read_hf_config(str(path))
        self.check_vocabulary("--opd-teacher-load", path, theirs)
        if same_architecture(theirs, self.hf_config):
            return False
        self.teacher = TeacherModel(self.args, path, self.layout, self.compute_dtype, self.device)
        return True

    def copy_weights(self, src: str, dst: str) -> None:
        super().copy_weights(src, dst)
        if dst == LIVE:
            optimizer_module.reload_copies(self.optimizer)

    def _buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        self._settle()
        return self.hub.buckets(bucket_bytes, dtype)

    def export_stage(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Export (`export`) this rank's pipeline stage alone, called by the ranks of that stage."""
        self._settle()
        return self.hub.stage_buckets(self.args.update_weight_buffer_size, dtype)

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        self._settle()
        return self._own_adapters().buckets(self.args.update_weight_buffer_size, dtype)

    def _adapter_names(self) -> Iterable[str]:
        return self._own_adapters().names

    def _own_adapters(self) -> SharedOut:
        assert self.adapters is not None, "this run trains no adapters"
        return self.adapters

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _manifest(self) -> dict[str, Any]:
        return dist_checkpoint.manifest(self)

    def _check_model(self, path: Path) -> dict[str, Any]:
        return dist_checkpoint.check_model(self, path)

    def _save_state(self, path: Path, *, with_optimizer: bool) -> None:
        self._settle()
        dist_checkpoint.save(self, path, with_optimizer=with_optimizer and self.args.optimizer == "adam")

    def _load_state(self, path: Path, manifest: dict[str, Any], *, with_optimizer: bool) -> None:
        self._settle()
        dist_checkpoint.load(self, path, manifest, with_optimizer=with_optimizer)

    def _save_weights(self, path: Path) -> None:
        dist_checkpoint.save(self, path, with_optimizer=False)

    def _load_weights(self, path: Path) -> None:
        self._settle()
        dist_checkpoint.read(self, path)

    def _finish_own_save(self, wait: bool) -> bool:
        with plain_errors():
            self.saves.maybe_finalize_async_calls(blocking=wait)
        return bool(self.saves.get_num_unfinalized_calls() == 0)

    def _move_parameters(self, device: torch.device) -> None:
        self._settle()
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                optimizer_module.move_buffer(buffer, device, self._away, self._host)
            for parameter in chunk.parameters():
                if not parameter.requires_grad:  # in no buffer
                    optimizer_module.move_storage(parameter.data, device, self._away, self._host)

    def _move_optimizer(self, device: torch.device) -> None:
        optimizer_module.move_state(self.optimizer, device, self._host)
