"""The FSDP2 trainer: log-prob passes, optimizer steps, checkpoints and weight export of one rank."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.algorithms.expert_balance import load_metrics
from slime.arguments import Args
from slime.backends.attention.context_parallel import StreamShare
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
from slime.backends.fsdp import dcp_checkpoint, hf_export, loading, lora, tensor_parallel
from slime.backends.fsdp.experts import ExpertWatch, balance_coefficient
from slime.backends.fsdp.layers import decoder_layers, prepare_layers
from slime.backends.fsdp.mesh import Mesh
from slime.backends.fsdp.model import PackedCausalLM, WholeMatrix, gather_full, local, reshard, shard
from slime.backends.fsdp.offload import HostMemory
from slime.backends.fsdp.scalar_model import PackedScalarLM
from slime.backends.fsdp.trainable import choose_trainable
from slime.backends.fsdp.working_copy import WorkingCopy
from slime.backends.shared.checkpoint_errors import plain_errors
from slime.backends.shared.microbatch import split_by_sample
from slime.backends.shared.optimizer import build_optimizer, learning_rate, set_rate
from slime.backends.shared.roles import (
    critic_settings,
    load_copies,
    load_critic,
    needs_critic,
    needs_reference,
    save_copies,
)
from slime.backends.shared.trainer_folder import check_content, is_checkpoint
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.batch.flops import ModelShape, total_forward_flops
from slime.utils import accelerator


def create_backend(
    args: Args,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device,
    total_steps: int | None = None,
    random_weights: bool = False,
) -> "FSDPBackend":
    """The trainer of this rank with the weights of --hf-checkpoint, and the
    models that its algorithm needs beside it.

    torch.distributed must be initialised. `total_steps` is the number of optimizer steps of the run, over
    which the learning rate decays when --lr-decay-iters is not given. `random_weights`: only the config is
    read, as speed tests do.
    """
    assert dist.is_initialized(), "torch.distributed must be initialised before a trainer is created"
    place = {
        "rank": rank,
        "world_size": world_size,
        "device": torch.device(device),
        "total_steps": total_steps,
    }
    backend = FSDPBackend(args, **place, random_weights=random_weights)
    if needs_reference(args):
        backend.load_model(args.ref_load or args.hf_checkpoint, weights="ref")
    if needs_critic(args):
        critic = FSDPBackend(critic_settings(args), **place, role="critic")
        dcp_checkpoint.check_same_decoder(
            critic.model.lm, backend.model.lm, "--critic-load", critic.args.hf_checkpoint
        )
        backend.critic = critic
    if args.use_opd and args.opd_type == "trainer":
        backend.load_teacher(args.opd_teacher_load)
    return backend


_COMPILE_FROM_WIDTH = 1024


class FSDPBackend:
    """One rank's model shard and optimizer. Every public method is called by all ranks together."""

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        total_steps: int | None = None,
        role: str = "actor",
        random_weights: bool = False,
    ) -> None:
        self.args = args
        self.critic: FSDPBackend | None = (
            None  # set by create_backend: a second model and optimizer on the same ranks
        )
        self.teacher: PackedCausalLM | None = (
            None  # a teacher of another shape; one of the same is a tagged copy
        )
        self.rank = rank
        self.mesh = Mesh.build(args, rank, world_size, device.type)
        self.layout = self.mesh.layout
        self.device = device
        self.optimizer_device = device
        self.compute_dtype = accelerator.compute_dtype(args.dtype, device)
        self.decay_steps = args.lr_decay_iters or total_steps
        self.step = 0  # optimizer steps taken
        self.pending_save: Future | None = None  # with --async-save: what is being written
        self.save_group: dist.ProcessGroup | None = None  # set by the first such save
        self.model = build_model(args, role)
        self.shape = ModelShape.from_hf_config(self.model.lm.config)
        choose_trainable(args, self.model.lm)
        lora.add_adapters(args, self.model.lm)
        self.experts = ExpertWatch(self.model.lm, balance_coefficient(args, self.model.lm))
        self.working = self._place(self.model, None if random_weights else args.hf_checkpoint)
        self.optimizer = build_optimizer(args, self.model.lm.named_parameters())
        self._host = HostMemory()
        self.copies = WeightCopies(
            lambda: [local(p.data) for p in self.model.parameters()], on_device=args.weight_copies == "device"
        )

    def _place(self, model: nn.Module, path: str | Path | None) -> WorkingCopy | None:
        """Spread the model over the ranks, give it storage and read the
        weights of `path` into it (None: random ones).

        A rank that is alone with its model needs no sharding; in 16 bit
        it computes on a copy, which is returned.
        """
        args, layers = self.args, decoder_layers(model.lm)
        known = loading.known_values(model.lm)
        prepare_layers(
            layers, model.lm.config, checkpointing=args.activation_checkpointing, compiled=self._compiles()
        )
        if self.mesh.tensor is not None:
            tensor_parallel.apply(model.lm, self.mesh.tensor)
        alone = dist.get_world_size() == 1 and not args.fsdp_cpu_offload
        if not alone:
            shard(model, self.mesh.shard, self.compute_dtype, offload=args.fsdp_cpu_offload)
        storage = torch.device("cpu") if args.fsdp_cpu_offload else self.device
        loading.allocate(model, storage, compute=self.device)
        if path is None:
            loading.fill_randomly(model.lm, args.seed)
        else:
            loading.fill(model.lm, path, known)
        model.eval()
        return (
            WorkingCopy(model, self.compute_dtype) if alone and self.compute_dtype != torch.float32 else None
        )

    def _compiles(self) -> bool:
        """By default on GPUs, for layers of some width. Routing to experts has shapes that depend on data,
        and cut matrices are DTensors: not these.
        """
        if self.args.compile is not None:
            return self.args.compile
        config = self.model.lm.config.get_text_config()
        experts = hasattr(config, "num_experts") or hasattr(config, "num_local_experts")
        alone = self.mesh.tensor is None and self.mesh.context_group is None
        # A minute of compiling pays only where a layer keeps the GPU busy.
        return (
            self.device.type == "cuda" and alone and not experts and config.hidden_size >= _COMPILE_FROM_WIDTH
        )

    # -- passes ----------------------------------------------------------------------------------------------

    def log_probs(
        self,
        mbs: list[MicroBatch],
        *,
        weights: str = LIVE,
        entropy: bool = False,
        at_head: HeadFunction | None = None,
    ) -> TokenLists:
        """Log-probs (and entropies) of every response token under the weights tagged `weights`."""
        passes = self._passes(mbs, weights, entropy=entropy, at_head=at_head)
        found = {name: dict(values) for name, values in passes.items()}
        ordered = {name: [values[p] for p in sorted(values)] for name, values in found.items()}
        return TokenLists(ordered["log_probs"], ordered.get("entropy"), ordered.get("extra"))

    def values(self, mbs: list[MicroBatch]) -> list[Tensor]:
        """The critic's value of every response token, [R_i] fp32 on the CPU."""
        assert self.critic is not None, "this run has no critic"
        found = dict(self.critic._passes(mbs, LIVE)["values"])
        return [found[p] for p in sorted(found)]

    def _passes(
        self, mbs: list[MicroBatch], weights: str, **options: Any
    ) -> dict[str, list[tuple[int, Tensor]]]:
        """(position, [R_i, ...]) of every sample for each kind of output, from passes without gradients."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        with self._holding(weights) as model, torch.no_grad():
            sent = [self._send(mb, model) for mb in mbs]
            outputs = [self._forward(mb, share, model=model, **options) for mb, share in sent]
            for mb, out in zip(mbs, outputs, strict=True):
                for name in ("log_probs", "entropy", "values", "extra"):
                    if (flat := getattr(out, name)) is not None:
                        # zip stops at once for a micro-batch of weight zero: it has no positions.
                        pairs = zip(mb.positions, split_by_sample(flat.cpu(), mb), strict=False)
                        found.setdefault(name, []).extend(pairs)
        return found

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
        # FSDP averages gradients over the ranks that share parameters; the loss is a sum over them.
        scale = self.layout.dp_size * self.layout.cp_size / denominators.value
        sums: dict[str, Tensor] = {}
        self.model.train()
        with self._working():
            # All inputs cross before the loop: inside it the host never waits for the device.
            for mb, share in [self._send(mb, self.model) for mb in mbs]:
                with self.experts.listening(mb):
                    out = self._forward(
                        mb, share, entropy=loss.needs_entropy, logits=loss.needs_logits, at_head=loss.at_head
                    )
                value, metrics = self.experts.add_balance(*loss.fn(out, mb), mb, denominators)
                (value * scale).backward()
                for name, metric in metrics.items():
                    sums[name] = sums[name] + metric if name in sums else metric
        self.model.eval()
        metrics, grad_norm = self._reduce(sums, denominators)
        if (counts := self.experts.take()) is not None:
            metrics |= load_metrics(self._sum_over_tokens(counts))
        self._check_finite(metrics, grad_norm)
        started = time.perf_counter()
        rates = set_rate(self.optimizer, learning_rate(self.args, self.step, self.decay_steps))
        applied = has_update(loss, denominators, metrics, grad_norm)
        if applied:
            self._apply(grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(metrics, grad_norm, rates, time.perf_counter() - started, applied)

    def _send(self, mb: MicroBatch, model: nn.Module) -> tuple[MicroBatch, StreamShare | None]:
        """The micro-batch on the device, and this rank's share of it under context parallelism."""
        if self.mesh.context_group is None:
            return mb.to(self.device), None
        after = isinstance(model, PackedScalarLM) and bool(model.offset)
        size, rank = self.layout.cp_size, self.layout.cp_rank
        share = StreamShare.of(mb, size, rank, self.mesh.context_group, after_token=after)
        return mb.to(self.device), share.to(self.device)

    def _forward(
        self, mb: MicroBatch, share: StreamShare | None, *, model: nn.Module | None = None, **options: Any
    ) -> TokenOutputs:
        model = model or self.model
        if isinstance(model, PackedScalarLM):
            return TokenOutputs(log_probs=None, values=model(mb, share)[0])
        log_probs, entropies, full, extra = model(
            mb,
            share,
            temperature=self.args.rollout_temperature,
            chunk_size=self.args.log_probs_chunk_size,
            memory_gib=self.args.logits_memory_gib,
            **options,
        )
        return TokenOutputs(log_probs=log_probs, entropy=entropies, logits=full, extra=extra)

    @contextmanager
    def _holding(self, weights: str) -> Iterator[nn.Module]:
        """The model with the weights tagged `weights`, for passes without gradients."""
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
        """Passes run inside: on the 16-bit copy of the weights where sharding does not make one."""
        return self.working.active() if self.working is not None else nullcontext()

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _square_of_gradients(self) -> Tensor:
        """This rank's part of the squared gradient norm: what
        tensor-parallel ranks hold alike counts once over them.
        """
        gradients = self._gradients()
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        if self.mesh.tensor is not None:
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            shares = [1.0 if tensor_parallel.is_cut(p) else 1.0 / self.layout.tp_size for p in parameters]
            squares = squares * torch.tensor(shares, dtype=torch.float64, device=squares.device)
        return squares.sum().to(self.device)

    def _reduce(self, sums: dict[str, Tensor], denominators: Denominators) -> tuple[dict[str, float], float]:
        """Metrics over the whole step and the global gradient norm, in one collective and one transfer."""
        names = sorted(sums)
        # Ranks of one replica hold the same metrics: each brings its part of them to the sum over all ranks.
        alike = self.layout.cp_size * self.layout.tp_size
        values = torch.stack([*(sums[name].double() / alike for name in names), self._square_of_gradients()])
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        values = values.tolist()
        metrics = {name: value / denominators.value for name, value in zip(names, values, strict=False)}
        return metrics, math.sqrt(values[-1]) if values[-1] >= 0 else math.nan

    def _check_finite(self, metrics: dict[str, float], grad_norm: float) -> None:
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not bad and math.isfinite(grad_norm):
            return
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteStepError(
            f"optimizer step {self.step} was not applied: {', '.join([*bad, f'grad_norm={grad_norm}'])}. "
            "The weights are "
            "those before the step; lower --lr or look for extreme log-probs or rewards in this batch."
        )

    def _apply(self, grad_norm: float) -> None:
        if self.args.clip_grad and grad_norm > self.args.clip_grad:
            torch._foreach_mul_(self._gradients(), self.args.clip_grad / (grad_norm + 1e-6))
        self.optimizer.step()
        self.step += 1

    def reset_optimizer(self) -> None:
        """Forget the moments of actor and critic; the schedules go on."""
        self.optimizer.state.clear()
        if self.critic is not None:
            self.critic.reset_optimizer()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over the data-parallel ranks, the same on all of them."""
        if self.layout.dp_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values, group=self.mesh.data_group)
        return values

    def _sum_over_tokens(self, counts: Tensor) -> Tensor:
        """Sum over the ranks that hold different tokens."""
        if self.mesh.shard.size() > 1:
            dist.all_reduce(counts, group=self.mesh.shard.get_group())
        return counts

    def forward_flops(self, lengths: list[int]) -> float:
        """Operations of one forward pass over documents of these lengths."""
        return total_forward_flops(self.shape, lengths)

    # -- weights ---------------------------------------------------------------------------------------------

    def load_hf(self, path: str | Path, *, weights: str = LIVE) -> None:
        """Read the weights of an HF folder into the live model or under another tag."""
        with self.copies.filling(weights):
            dcp_checkpoint.load_hf_weights(self.model, path)

    def load_model(self, path: str | Path, *, weights: str) -> None:
        """Read an HF folder, or a checkpoint of this same model, into the weights tagged `weights`."""
        if not is_checkpoint(path):
            self.load_hf(path, weights=weights)
            return
        check_content(Path(path), self.args)
        with self.copies.filling(weights):
            dcp_checkpoint.load(self, Path(path), weights_only=True)

    def load_teacher(self, path: str | Path) -> None:
        """Keep the model of `path` under the tag "teacher"; its vocabulary must be the policy's.

        `path` is an HF folder, or a checkpoint of a model of the policy's shape."""
        if is_checkpoint(path):
            self.load_model(path, weights="teacher")
            return
        source = loading.empty_model(path)
        own, theirs = self.model.lm.config.vocab_size, source.config.vocab_size
        if own != theirs:
            raise ValueError(
                f"--opd-teacher-load {path} has {theirs} tokens in its vocabulary, --hf-checkpoint has "
                f"{own}: a teacher scores the policy's own tokens, so both must share one tokenizer; choose "
                "a teacher of the same family."
            )
        if (
            dcp_checkpoint.fingerprint(source)["digest"]
            == dcp_checkpoint.fingerprint(self.model.lm)["digest"]
        ):
            self.load_hf(path, weights="teacher")
            return
        self.teacher = PackedCausalLM(source).requires_grad_(False)
        shard(self.teacher, self.mesh.shard, self.compute_dtype)
        loading.allocate(self.teacher, torch.device("cpu"))
        loading.fill(source, path)
        self.teacher.eval()

    def output_matrix(self, weights: str) -> WholeMatrix:
        """The whole output matrix [V, H] of the weights tagged `weights`, in
        the dtype of the passes, on this device.
        """
        with self._holding(weights) as model:
            matrix = gather_full(model.lm.get_output_embeddings().weight.detach())
            return WholeMatrix(matrix.to(self.device, self.compute_dtype, copy=True))

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

    def export_stage(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """`export`: this trainer is one pipeline stage."""
        return self.export(dtype)

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Buckets of (peft's name, full tensor) of the adapters alone; a collective."""
        named = lora.adapter_tensors(self.model.lm)
        return hf_export.in_buckets(named, self.args.update_weight_buffer_size, dtype)

    def adapter_config(self) -> dict[str, Any]:
        """What an engine must know of the adapters beside their tensors, as peft writes it."""
        return lora.adapter_config(self.args, self.model.lm)

    def save_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write an HF folder that `from_pretrained` reads, with the tokenizer of
        --hf-checkpoint; appears whole or not at all.

        Adapters are merged into it, and stand alone in its folder `adapter`.
        """
        limit = self.args.update_weight_buffer_size
        scalar = isinstance(self.model, PackedScalarLM)
        hf_export.save_folder(
            self.model.lm, Path(path), self.args.hf_checkpoint, limit, dtype, self.rank, scalar=scalar
        )
        if self.args.lora_rank:
            lora.save_adapter(self.args, self.model.lm, Path(path) / "adapter", self.rank)
        dist.barrier()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> dict[str, Any]:
        """Write weights, optimizer (unless --no-save-optim), schedule position
        and random state into the folder `path`.

        A critic has a folder of its own in it, and so have copies
        that move. Returns the manifest beside them.
        """
        if self.critic is not None:
            self.critic.save(Path(path) / "critic")
        save_copies(
            self.args, self.copies, Path(path), lambda folder: dcp_checkpoint.save_weights(self, folder)
        )
        return dcp_checkpoint.save(self, Path(path), with_optimizer=not self.args.no_save_optim)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether all that `save` was given is on disk; `wait`: until it is."""
        done = self.critic is None or self.critic.finish_save(wait=wait)
        if self.pending_save is not None and (wait or self.pending_save.done()):
            pending, self.pending_save = self.pending_save, None
            with plain_errors():
                pending.result()
        return done and self.pending_save is None

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a folder written by `save`, also by another number of
        ranks; with --finetune only its weights.
        """
        if self.critic is not None:
            load_critic(self.critic, self.args, Path(path))
        load_copies(
            self.args, self.copies, Path(path), lambda folder: dcp_checkpoint.load_weights(self, folder)
        )
        return dcp_checkpoint.load(self, Path(path), weights_only=self.args.finetune)

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
        if params is not None and not self.args.fsdp_cpu_offload:
            self._host.move_model(self.model, torch.device(params))
            if self.working is not None:
                self.working.drop()
        if optimizer is not None and not self.args.fsdp_cpu_offload:
            self.optimizer_device = torch.device(optimizer)
            self._host.move_state(self.optimizer, self.optimizer_device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def build_model(args: Args, role: str) -> nn.Module:
    """The model of a role, without storage: a policy, a critic that looks before
    each token, a reward model that looks after.
    """
    lm = loading.empty_model(args.hf_checkpoint)
    if role == "critic" or args.loss_type == "rm_loss":
        return PackedScalarLM(lm, args.hf_checkpoint, after_token=role != "critic", seed=args.seed)
    return PackedCausalLM(lm)
