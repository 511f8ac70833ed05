"""The base of both trainers: additional models, the end of a step, checkpoints, moves between devices."""

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slime.arguments import Args
from slime.backends.base import (
    Bucket,
    Denominators,
    Layout,
    Loss,
    MicroBatch,
    NonFiniteStepError,
    StepPlace,
    StepStats,
    has_update,
)
from slime.backends.shared.learning_rate import learning_rate, set_rate
from slime.backends.shared.model_roles import (
    critic_settings,
    load_copies,
    load_critic,
    needs_critic,
    needs_reference,
    save_copies,
)
from slime.backends.shared.trainer_folder import check_content, is_checkpoint
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.batch.flops import ModelShape, Stream, pass_flops
from slime.utils.machine import accelerator


class TrainerBase(ABC):
    """One rank's part of a model, its optimizer, and the models beside it; subclasses spread them over ranks.

    Every public method is called by all ranks together.
    """

    layout: Layout  # this and the next three are set by the subclass
    data_group: dist.ProcessGroup | None  # the data-parallel ranks
    copies: WeightCopies
    optimizer: Any  # of torch, or Megatron's own

    def __init__(
        self, args: Args, *, rank: int, device: torch.device, total_steps: int | None, role: str
    ) -> None:
        assert args.hf_checkpoint is not None, "a trainer starts from --hf-checkpoint"
        self.args, self.hf_checkpoint, self.role = args, args.hf_checkpoint, role
        self.rank, self.device = rank, device
        self.critic: Self | None = None  # a second model and optimizer on the same ranks; set by `add_models`
        self.compute_dtype = accelerator.compute_dtype(args.dtype, device)
        self.decay_steps = args.lr_decay_iters or total_steps
        self.step = 0  # optimizer steps taken
        self._flops = 0.0  # operations of this rank since `drain_flops`
        self.is_scalar = role == "critic" or args.loss_type == "rm_loss"

    def expect_steps(self, num_steps: int) -> None:
        for model in (self, self.critic):
            if model is not None:
                model.decay_steps = model.decay_steps or num_steps

    def change_setting(self, name: str, value: float) -> None:
        """Change a setting of the actor from the next step on: `lr` or `rollout_temperature`."""
        assert hasattr(self.args, name), f"there is no setting {name}"
        changed = copy.copy(self.args)  # other objects may hold the original args
        vars(changed)[name] = value
        self.args = changed

    def add_models(self, build_critic: Callable[[Args], Self]) -> None:
        """Load the reference, the critic and the teacher, each where the algorithm of the run needs it."""
        args = self.args
        if needs_reference(args):
            self.load_model(args.ref_load or self.hf_checkpoint, weights="ref")
        if needs_critic(args):
            self.critic = build_critic(critic_settings(args))
        if args.use_opd and args.opd_type == "trainer":
            assert args.opd_teacher_load is not None, "flags require --opd-teacher-load here"
            self.load_teacher(args.opd_teacher_load)

    def _own_critic(self) -> Self:
        assert self.critic is not None, "this run has no critic"
        return self.critic

    # -- optimizer steps -------------------------------------------------------------------------------------

    def train_step(
        self,
        mbs: list[MicroBatch],
        loss: Loss,
        denominators: Denominators,
        *,
        model: str = LIVE,
        place: StepPlace | None = None,
    ) -> StepStats:
        """One optimizer step over all micro-batches; raises without applying it if a number is not finite."""
        if model == "critic":
            return self._own_critic().train_step(mbs, loss, denominators)
        metrics, grad_norm = self._accumulate(mbs, loss, denominators, place)
        return self._finish_step(loss, denominators, metrics, grad_norm)

    @abstractmethod
    def _accumulate(
        self, mbs: list[MicroBatch], loss: Loss, denominators: Denominators, place: StepPlace | None
    ) -> tuple[dict[str, float], float]:
        """Run both passes of all micro-batches; the metrics of the step and the norm of its gradient."""

    @abstractmethod
    def _apply(self, grad_norm: float) -> None:
        """Clip the gradients and change the weights."""

    def _finish_step(
        self, loss: Loss, denominators: Denominators, metrics: dict[str, float], grad_norm: float
    ) -> StepStats:
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad or not math.isfinite(grad_norm):
            raise NonFiniteStepError(
                f"optimizer step {self.step} was not applied: {', '.join([*bad, f'grad_norm={grad_norm}'])}. "
                "The weights are those before the step; lower --lr or look for extreme log-probs or rewards "
                "in this batch."
            )
        started = time.perf_counter()
        rates = set_rate(self.optimizer, learning_rate(self.args, self.step, self.decay_steps))
        applied = has_update(loss, denominators, metrics, grad_norm)
        if applied:
            self._apply(grad_norm)
            self.step += 1
        return StepStats(metrics, grad_norm, rates, time.perf_counter() - started, applied)

    def reset_optimizer(self) -> None:
        """Reset the moments of actor and critic; learning-rate schedules continue."""
        self._forget_moments()
        if self.critic is not None:
            self.critic.reset_optimizer()

    @abstractmethod
    def _forget_moments(self) -> None: ...

    def drain_flops(self) -> float:
        """Return the operations of this rank's passes since the last call, with those of its critic."""
        done, self._flops = self._flops, 0.0
        return done if self.critic is None else done + self.critic.drain_flops()

    def _set_costs(self, config: Any, parameters: Iterable[Tensor]) -> None:
        """Note what decides the operations of a pass: the model's sizes, and which weights train."""
        shape = ModelShape.from_hf_config(config)
        body = ModelShape(shape.matrices - shape.output, shape.attention)
        self._shape = body if self.is_scalar else shape  # a head of one number costs next to nothing
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
        trained = sum(size for size, trains in sizes if trains)
        self._trained_share = trained / max(1, sum(size for size, _ in sizes))

    def _count_pass(self, positions: Tensor, predicted: int, *, backward: bool) -> None:
        """Count a pass over a stream of tokens (`Stream`); the ranks of a replica do equal parts of it."""
        ranks = self.layout.tp_size * self.layout.pp_size * self.layout.cp_size
        stream, trained = Stream.of(positions, predicted), self._trained_share
        self._flops += pass_flops(self._shape, stream, backward=backward, trained=trained) / ranks

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over the data-parallel ranks, the same on all of them."""
        if self.layout.dp_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values, group=self.data_group)
        return values

    # -- weights ---------------------------------------------------------------------------------------------

    def load_hf(self, path: str | Path, *, weights: str = LIVE) -> None:
        """Read the weights of an HF folder into the live model or under another tag."""
        with self.copies.filling(weights):
            self._read_hf(path)

    @abstractmethod
    def _read_hf(self, path: str | Path) -> None:
        """Read the weights of an HF folder into the live model."""

    def load_model(self, path: str | Path, *, weights: str) -> None:
        """Read an HF folder, or a checkpoint of this same model, into the weights tagged `weights`."""
        if not is_checkpoint(path):
            self.load_hf(path, weights=weights)
            return
        check_content(Path(path), self.args)
        with self.copies.filling(weights):
            self._read_checkpoint(Path(path))

    @abstractmethod
    def _read_checkpoint(self, path: Path) -> None:
        """Read the weights of a checkpoint of this same model into the live model."""

    @abstractmethod
    def load_teacher(self, path: str | Path) -> None:
        """Keep the model of `path` under the tag "teacher"; its vocabulary must be the policy's.

        `path` is an HF folder, or a checkpoint of a model of the policy's shape.
        """

    def check_vocabulary(self, flag: str, path: str | Path, theirs: int, own: int) -> None:
        """Refuse a teacher or critic whose vocabulary differs; its size and family may differ."""
        if theirs != own:
            raise ValueError(
                f"{flag} {path} has {theirs} tokens in its vocabulary, --hf-checkpoint has {own}: it reads "
                "the policy's own tokens, so both must share one tokenizer; choose one of the same family."
            )

    def copy_weights(self, src: str, dst: str) -> None:
        self.copies.copy(src, dst)

    def has_weights(self, tag: str) -> bool:
        return tag in self.copies

    def export(
        self, dtype: torch.dtype | None = None, *, weights: str = LIVE, bucket_bytes: int | None = None
    ) -> Iterator[Bucket]:
        """Buckets of (hub name, full tensor); a collective. Tensors are valid until the next bucket."""
        with self.copies.active(weights):
            yield from self._buckets(bucket_bytes or self.args.update_weight_buffer_size, dtype)

    @abstractmethod
    def _buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        """The weights that the live model holds now."""

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> dict[str, Any]:
        """Write weights, optimizer (unless --no-save-optim), schedule position and random state into `path`.

        A critic has a folder of its own in it, and so have copies that move. Returns the manifest.
        """
        if self.critic is not None:
            self.critic.save(Path(path) / "critic")
        save_copies(self.args, self.copies, Path(path), self._save_weights)
        return self._save_state(Path(path), with_optimizer=not self.args.no_save_optim)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a folder written by `save`, also under another layout; with --finetune only its weights."""
        if self.critic is not None:
            load_critic(self.critic.load, self.args, Path(path))
        load_copies(self.args, self.copies, Path(path), self._load_weights)
        return self._load_state(Path(path), weights_only=self.args.finetune)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether the last save is complete on disk; `wait`: block until it is."""
        done = self.critic is None or self.critic.finish_save(wait=wait)
        return self._finish_own_save(wait) and done

    @abstractmethod
    def _save_state(self, path: Path, *, with_optimizer: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _load_state(self, path: Path, *, weights_only: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _save_weights(self, path: Path) -> None:
        """Save only the weights that the live model holds now."""

    @abstractmethod
    def _load_weights(self, path: Path) -> None:
        """Load what `_save_weights` wrote into the live model."""

    @abstractmethod
    def _finish_own_save(self, wait: bool) -> bool: ...

    # -- places ----------------------------------------------------------------------------------------------

    def move(
        self, *, params: str | torch.device | None = None, optimizer: str | torch.device | None = None
    ) -> None:
        """Put parameters and optimizer state on a device; None leaves them. Nothing to do on a CPU."""
        if self.device.type == "cpu":
            return
        if self.critic is not None:
            # A push needs the actor alone: the critic's weights come only for training, with the optimizers.
            self.critic.move(params=optimizer if params is not None else None, optimizer=optimizer)
        if params is not None:
            self._move_parameters(torch.device(params))
        if optimizer is not None:
            self._move_optimizer(torch.device(optimizer))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @abstractmethod
    def _move_parameters(self, device: torch.device) -> None: ...

    @abstractmethod
    def _move_optimizer(self, device: torch.device) -> None: ...
