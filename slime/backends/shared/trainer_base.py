"""The base of both trainers: additional models, the end of a step, checkpoints, moves between devices."""

import copy
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slime.arguments import Args
from slime.backends.base import (
    Bucket,
    Denominators,
    HeadFunction,
    Layout,
    Loss,
    MicroBatch,
    NonFiniteStepError,
    OutputMatrix,
    StepPlace,
    StepStats,
    TokenLists,
    has_update,
)
from slime.backends.shared import adapters, hf_folder
from slime.backends.shared.learning_rate import learning_rate
from slime.backends.shared.model_roles import (
    critic_settings,
    moving_copies,
    needs_critic,
    needs_reference,
)
from slime.backends.shared.trainer_folder import (
    FORMAT_VERSION,
    MANIFEST,
    check_optimizer,
    is_checkpoint,
    load_random_state,
    random_state,
)
from slime.backends.shared.weight_copies import LIVE, WeightCopies
from slime.batch.flops import ModelShape, Stream, pass_flops
from slime.utils.files.step_folders import check_trainer_folder
from slime.utils.files.torch_dist_folder import is_torch_dist
from slime.utils.machine import accelerator
from slime.utils.machine.accelerator import gpu

logger = logging.getLogger(__name__)


class TrainBackend(ABC):
    """One rank's part of a model, its optimizer, and additional models; subclasses define the sharding.

    Every public method is called by all ranks together.
    """

    device: torch.device
    compute_dtype: torch.dtype  # dtype of the passes; results and master weights are fp32
    layout: Layout  # this and the next three are set by the subclass
    data_group: dist.ProcessGroup | None  # the data-parallel ranks
    copies: WeightCopies
    optimizer: Any  # torch's optimizer, or Megatron's

    hf_config: Any  # config of transformers
    state_folder = ""  # in a checkpoint: where weights and moments are

    def __init__(self, args: Args, *, rank: int, device: torch.device, role: str) -> None:
        assert args.hf_checkpoint is not None, "a trainer starts from --hf-checkpoint"
        self.args, self.hf_checkpoint, self.role = args, args.hf_checkpoint, role
        self.rank, self.device = rank, device
        self.critic: Self | None = None  # a second model and optimizer on the same ranks; set by `create`
        self.compute_dtype = accelerator.compute_dtype(args.dtype, device)
        self.decay_steps = args.lr_decay_iters
        self.step = 0  # optimizer steps taken
        self._flops = 0.0  # operations of this rank since `drain_flops`
        self.is_scalar = role == "critic" or args.loss_type == "rm_loss"

    @classmethod
    def create(cls, args: Args, *, random_weights: bool = False, **place: Any) -> Self:
        """Build this rank's trainer with the weights of --hf-checkpoint, and the models its algorithm needs.

        torch.distributed must be initialised. `random_weights`: only the config is read, as speed tests do.
        `place`: rank, number of ranks and device.
        """
        build: Any = cls  # the constructors of all trainers take these
        trainer: Self = build(args, random_weights=random_weights, **place)
        if needs_reference(args):
            trainer.load_model(args.ref_load or trainer.hf_checkpoint, weights="ref")
        if needs_critic(args):
            trainer.critic = critic = build(cls.settings_of_critic(args), role="critic", **place)
            trainer.check_vocabulary("--critic-load", critic.hf_checkpoint, critic.hf_config)
        if args.use_opd and args.opd_type == "trainer":
            assert args.opd_teacher_load is not None, "flags require --opd-teacher-load here"
            trainer.load_teacher(args.opd_teacher_load)
        return trainer

    @classmethod
    def settings_of_critic(cls, args: Args) -> Args:
        return critic_settings(args)

    def expect_steps(self, num_steps: int) -> None:
        """Set the number of optimizer steps for schedules, if the data decides it (--num-epoch)."""
        for model in (self, self.critic):
            if model is not None:
                model.decay_steps = model.decay_steps or num_steps

    def change_setting(self, name: str, value: float) -> None:
        """Change a setting of the actor from the next step on: `lr` or `rollout_temperature`."""
        assert hasattr(self.args, name), f"there is no setting {name}"
        changed = copy.copy(self.args)  # other objects may refer to the original args
        vars(changed)[name] = value
        self.args = changed

    def _own_critic(self) -> Self:
        assert self.critic is not None, "this run has no critic"
        return self.critic

    # -- passes without gradients ----------------------------------------------------------------------------

    def log_probs(
        self,
        mbs: list[MicroBatch],
        *,
        weights: str = LIVE,
        entropy: bool = False,
        at_head: HeadFunction | None = None,
    ) -> TokenLists:
        """Log-probs (and entropies) of every response token under the weights tagged `weights`."""
        found = self._outputs(mbs, weights, entropy=entropy, at_head=at_head)
        return TokenLists(found["log_probs"], found.get("entropy"), found.get("extra"))

    def values(self, mbs: list[MicroBatch]) -> list[Tensor]:
        """Return the critic's value of every response token, [R_i] fp32 on the CPU."""
        return self._own_critic()._outputs(mbs, LIVE)["values"]

    @abstractmethod
    def _outputs(self, mbs: list[MicroBatch], weights: str, **options: Any) -> dict[str, list[Tensor]]:
        """Return each kind of output by sample, in the order of the batch."""

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
                "The weights are those before the step; lower --lr or check for extreme log-probs or rewards "
                "in this batch."
            )
        started = time.perf_counter()
        rate = learning_rate(self.args, self.step, self.decay_steps)
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = rate
        applied = has_update(loss, denominators, metrics, grad_norm)
        if applied:
            self._apply(grad_norm)
            self.step += 1
        return StepStats(metrics, grad_norm, (rate,) * len(groups), time.perf_counter() - started, applied)

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
        self._shape = body if self.is_scalar else shape  # the cost of a scalar head is negligible
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
        # Before loading; each rank checks its share of the files.
        check_trainer_folder(Path(path), share=(dist.get_rank(), dist.get_world_size()))
        with self.copies.filling(weights):
            self._check_model(Path(path))
            self._load_weights(Path(path) / self.state_folder)

    def load_teacher(self, path: str | Path) -> None:
        """Keep the model of `path` under the tag "teacher"; its vocabulary must be the policy's.

        `path` is an HF folder, or a checkpoint of a model of the policy's shape.
        """
        if is_checkpoint(path) or is_torch_dist(path):
            self.load_model(path, weights="teacher")
        elif not self._build_teacher(path):
            self.load_hf(path, weights="teacher")

    @abstractmethod
    def _build_teacher(self, path: str | Path) -> bool:
        """Build the teacher of an HF folder, or return False where it has the policy's shape."""

    def check_vocabulary(self, flag: str, path: str | Path, theirs: Any) -> None:
        """Refuse a teacher or critic whose vocabulary differs; its size and family may differ."""
        size, own = theirs.vocab_size, self.hf_config.vocab_size
        if size != own:
            raise ValueError(
                f"{flag} {path} has {size} tokens in its vocabulary, --hf-checkpoint has {own}: it reads "
                "the policy's own tokens, so both must share one tokenizer; choose one of the same family."
            )

    def copy_weights(self, src: str, dst: str) -> None:
        self.copies.copy(src, dst)

    def export(self, dtype: torch.dtype | None = None, *, weights: str = LIVE) -> Iterator[Bucket]:
        """Yield buckets of (hub name, full tensor); a collective. Tensors are valid until the next bucket."""
        with self.copies.active(weights):
            yield from self._buckets(self.args.update_weight_buffer_size, dtype)

    @abstractmethod
    def _buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        """Yield the current weights of the live model."""

    @abstractmethod
    def export_stage(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Export this rank's pipeline stage alone; all stages one after another are `export`.

        All ranks call it together. Then stages go through their buckets independently.
        """

    @abstractmethod
    def output_matrix(self, weights: str) -> OutputMatrix | None:
        """Return the output matrix of the weights with that tag; None on a stage without a head."""

    @abstractmethod
    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Yield buckets of (peft's name, full tensor) of the adapters alone; a collective."""

    @abstractmethod
    def _adapter_names(self) -> Iterable[str]: ...

    def adapter_config(self) -> dict[str, Any]:
        """Return the adapter config for engines, in peft's format."""
        return adapters.adapter_config(self.args, self._adapter_names())

    def save_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write an HF folder with weights and tokenizer; it appears whole or not at all.

        Adapters are merged into the weights, and also written alone to the sub-folder `adapter`.
        """
        path, dtype = Path(path), dtype or hf_folder.dtype_of(self.hf_checkpoint)
        layout = self.layout
        share = hf_folder.Share(layout.pp_rank, *layout.place_in_stage)
        hf_folder.save(
            self.export_stage(dtype), path, self.hf_checkpoint, dtype, share, scalar=self.is_scalar
        )
        if self.args.lora_rank:
            pairs = (pair for bucket in self.export_adapter() for pair in bucket)
            tensors = {name: tensor.cpu() for name, tensor in pairs if self.rank == 0}
            config = self.adapter_config()
            if self.rank == 0:
                adapters.write_adapter(path / "adapter", tensors, config)
            dist.barrier()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> dict[str, Any]:
        """Write weights, optimizer (unless --no-save-optim), schedule position and random state into `path`.

        A critic and changing copies have sub-folders of their own. Returns the manifest. With
        --async-save the state is only copied, see `finish_save`.
        """
        path, with_optimizer = Path(path), not self.args.no_save_optim
        if self.critic is not None:
            self.critic.save(path / "critic")
        for tag in moving_copies(self.args):
            if tag in self.copies:
                with self.copies.active(tag):
                    self._save_weights(path / tag)
        path.mkdir(parents=True, exist_ok=True)
        self._save_state(path / self.state_folder, with_optimizer=with_optimizer)
        torch.save(random_state(), path / f"rng_{self.rank}.pt")
        manifest = {
            "format_version": FORMAT_VERSION,
            "optimizer": self.args.optimizer if with_optimizer else None,
            "step": self.step,
            **self._manifest(),
        }
        if self.rank == 0:
            (path / MANIFEST).write_text(json.dumps(manifest))
        dist.barrier()
        return manifest

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a folder written by `save`, also under another layout; with --finetune only its weights."""
        path = Path(path)
        if self.critic is not None:
            self._load_critic(self.critic, path)
        for tag in () if self.args.finetune else moving_copies(self.args):
            if (path / tag).is_dir():
                with self.copies.filling(tag):
                    self._load_weights(path / tag)
            elif tag in self.copies:
                logger.warning("Checkpoint %s has no weights %r: the run keeps its initial ones.", path, tag)
        manifest = self._check_model(path)
        with_optimizer = not (self.args.finetune or self.args.no_load_optim)
        if with_optimizer:
            check_optimizer(manifest, self.args.optimizer, path)
        self._load_state(path / self.state_folder, manifest, with_optimizer=with_optimizer)
        if not self.args.finetune:
            self.step = manifest["step"]
            if not self.args.no_load_rng:
                load_random_state(path / f"rng_{self.rank}.pt", self.rank)
        return manifest

    def _load_critic(self, critic: Self, path: Path) -> None:
        """Load the critic that was saved with the actor in `path`; only --finetune may do without it."""
        args = self.args
        if (path / "critic").is_dir():
            critic.load(path / "critic")
        elif args.finetune:
            start = args.critic_load or args.hf_checkpoint
            logger.warning("Checkpoint %s has no critic: the critic starts from %s.", path, start)
        else:
            raise ValueError(
                f"checkpoint {path} has no critic, but --advantage-estimator {args.advantage_estimator} "
                "trains one: resume with the estimator it was saved with, or load it with --finetune."
            )

    def finish_save(self, *, wait: bool) -> bool:
        """Return whether the last save is complete on disk; `wait`: block until it is."""
        done = self.critic is None or self.critic.finish_save(wait=wait)
        return self._finish_own_save(wait) and done

    @abstractmethod
    def _manifest(self) -> dict[str, Any]:
        """Return the manifest's entries about the model and its layout."""

    @abstractmethod
    def _check_model(self, path: Path) -> dict[str, Any]:
        """Return the manifest of a checkpoint, which must be of this trainer and fit this model."""

    @abstractmethod
    def _save_state(self, path: Path, *, with_optimizer: bool) -> None: ...

    @abstractmethod
    def _load_state(self, path: Path, manifest: dict[str, Any], *, with_optimizer: bool) -> None: ...

    @abstractmethod
    def _save_weights(self, path: Path) -> None:
        """Save only the weights that the live model holds now."""

    @abstractmethod
    def _load_weights(self, path: Path) -> None:
        """Load what `_save_weights` wrote, or the weights of a checkpoint, into the live model."""

    @abstractmethod
    def _finish_own_save(self, wait: bool) -> bool: ...

    # -- places ----------------------------------------------------------------------------------------------

    def move(
        self, *, params: str | torch.device | None = None, optimizer: str | torch.device | None = None
    ) -> None:
        """Move parameters and optimizer state to a device; None leaves them. Does nothing on a CPU."""
        if self.device.type == "cpu":
            return
        if self.critic is not None:
            # A push needs the actor alone: the critic's weights come only for training, with the optimizers.
            self.critic.move(params=optimizer if params is not None else None, optimizer=optimizer)
        if params is not None:
            self._move_parameters(torch.device(params))
        if optimizer is not None:
            self._move_optimizer(torch.device(optimizer))
        gpu.synchronize()
        gpu.empty_cache()

    @abstractmethod
    def _move_parameters(self, device: torch.device) -> None: ...

    @abstractmethod
    def _move_optimizer(self, device: torch.device) -> None: ...
