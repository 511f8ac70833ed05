"""Flags and rules of the training step: its batch, how samples are packed, the optimizer and its schedule."""

from dataclasses import dataclass
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, having, lacks, needs, option_of
from slime.arguments.groups.objectives import NOT_PAIRS
from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND
from slime.catalog.optimizers import OPTIMIZERS

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # bytes of one number, by precision

# -- when flags have an effect
BY_TOKENS = needs("use_dynamic_batch_size", harmless=True)
OWN_LOSS = needs("loss_type", "custom_loss", harmless=True)
BY_SAMPLES = lacks("use_dynamic_batch_size", harmless=True)
DECAYS = lacks("lr_decay_style", "constant", said_by="lr_decay_style")
ADAM = needs("optimizer", "adam", harmless=True)
USES_ADAM = needs("optimizer", *having(OPTIMIZERS, "uses_adam"), harmless=True)
OFFLOADED = needs("optimizer_cpu_offload", harmless=True)
MEGATRON_GRADIENTS = needs("train_backend", *having(BACKENDS, "takes_megatron_flags"))


@dataclass
class TrainingFlags:
    """Training."""

    train_backend: str = flag(
        DEFAULT_BACKEND,
        "trainer implementation; " + "; ".join(f"{name}: {row.help}" for name, row in BACKENDS.items()),
        choices=tuple(BACKENDS),
        alias="--backend",
    )
    dtype: str = flag(
        "auto",
        "compute precision; master weights are float32. auto: bfloat16 if the device supports it, else "
        "float32; on a CPU only for models stored in 16 bits. float16: with a loss scale (FSDP)",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    global_batch_size: int | None = flag(None, "samples per optimizer step; default: a whole rollout", ge=1)
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout (or --global-batch-size)", ge=1
    )
    micro_batch_size: int = flag(
        1, "samples per forward pass; turns --use-dynamic-batch-size off", ge=1, only_with=BY_SAMPLES
    )
    use_dynamic_batch_size: bool | None = flag(
        None, "fill micro-batches by tokens. Default: on, unless --micro-batch-size is given"
    )
    max_tokens_per_gpu: int | None = flag(
        None, "most tokens of a micro-batch. Default: what fits into GPU memory", ge=1, only_with=BY_TOKENS
    )
    balance_data: bool = flag(False, "balance estimated work over data-parallel ranks")
    balance_by_flops: bool = flag(False, "balance micro-batches by estimated work too; sets --balance-data")
    calculate_per_token_loss: bool = flag(
        False, "mean over all tokens of a step instead of over its rollouts", only_with=NOT_PAIRS
    )
    log_probs_chunk_size: int = flag(-1, "tokens per chunk of log-probs and entropy; -1: one chunk", ge=-1)
    recompute_loss_function: bool = flag(
        False, "compute your loss again in the backward pass", only_with=OWN_LOSS
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "function that edits the train data on every rank before training"
    )


@dataclass
class OptimizerFlags:
    """Optimizer."""

    optimizer: str = flag(
        "adam",
        "; ".join(f"{name}: {row.help}" for name, row in OPTIMIZERS.items()),
        choices=tuple(OPTIMIZERS),
    )
    lr: float = flag(1e-6, "learning rate", ge=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", ge=0, only_with=DECAYS)
    lr_decay_style: str = flag("constant", "schedule after warm-up", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", ge=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a share of the steps of --lr-decay-iters, or of the run", ge=0, lt=1
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr; default: the whole run", ge=1, only_with=DECAYS
    )
    weight_decay: float = flag(0.01, "weight decay (decoupled)", ge=0)
    adam_beta1: float = flag(0.9, "first-moment decay", ge=0, lt=1, only_with=USES_ADAM)
    adam_beta2: float = flag(0.999, "second-moment decay", ge=0, lt=1, only_with=USES_ADAM)
    adam_eps: float = flag(1e-8, "added to the denominator of Adam", gt=0, only_with=USES_ADAM)
    optimizer_cpu_offload: bool = flag(
        False, "keep Adam's moments in host memory, with the same bits", only_with=ADAM
    )
    optimizer_offload_fraction: float = flag(
        1.0, "share of the parameters whose moments are kept there", ge=0, le=1, only_with=OFFLOADED
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "move moments while others are updated", only_with=OFFLOADED
    )
    exp_avg_dtype: str = flag(
        "fp32", "precision of the first moment", choices=tuple(MOMENT_BYTES), only_with=ADAM
    )
    exp_avg_sq_dtype: str = flag(
        "fp32", "precision of the second moment", choices=tuple(MOMENT_BYTES), only_with=ADAM
    )
    main_grads_dtype: str = flag(
        "fp32", "precision of accumulated gradients", choices=("fp32", "bf16"), only_with=MEGATRON_GRADIENTS
    )
    clip_grad: float = flag(1.0, "largest gradient norm; 0 turns clipping off", ge=0)


def derive_batch(draft: Draft) -> None:
    """Derive --global-batch-size and --num-steps-per-rollout from each other; default: one step a rollout."""
    total = draft.rollout_batch_size * draft.n_samples_per_prompt
    size, steps = draft.global_batch_size, draft.num_steps_per_rollout
    if steps is not None:
        _check_steps(draft, total)
        draft.derive("global_batch_size", total // steps, "samples of a rollout / num_steps_per_rollout")
        return
    if size is None:
        size = total
        draft.derive("global_batch_size", total, "all samples of a rollout make one optimizer step")
    _check_global_batch(draft, size, total)
    draft.derive("num_steps_per_rollout", total // size, "samples of a rollout / global_batch_size")


def _check_global_batch(draft: Draft, size: int, total: int) -> None:
    if size > total:
        raise ValueError(
            f"--global-batch-size is {size}, but one rollout makes only {_samples(draft)}: use at most "
            f"{total}, or raise --rollout-batch-size."
        )
    if total % size:
        steps, rest = divmod(total, size)
        raise ValueError(
            f"--global-batch-size is {size}, but {_samples(draft)} = {count(steps, 'optimizer step')} of "
            f"{size} and {rest} left over, which would not be trained on. Use a divisor of {total} (nearest: "
            f"{_nearest_divisor(total, size)})."
        )


def _check_steps(draft: Draft, total: int) -> None:
    steps, size = draft.num_steps_per_rollout, draft.global_batch_size
    if total % steps:
        raise ValueError(
            f"--num-steps-per-rollout is {steps}, but {_samples(draft)} cannot be split into {steps} equal "
            f"optimizer steps. Use a divisor of {total} (nearest: {_nearest_divisor(total, steps)})."
        )
    if size is not None and size * steps != total:
        raise ValueError(
            f"--global-batch-size is {size} and --num-steps-per-rollout is {steps}: together {size * steps} "
            f"samples, but {_samples(draft)}. Give only one of them ({steps} steps of {total // steps})."
        )


def explain_batch(args: Any) -> str:
    """Return a line such as `4 prompts x 8 samples = 32 = 1 optimizer step of 32, at most 4096 tokens`."""
    if args.num_rollout == 0:
        return "no training steps: this run only evaluates"
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = count(samples // args.global_batch_size, "optimizer step")
    line = f"{_samples(args)} = {steps} of {args.global_batch_size}"
    if args.debug_rollout_only:
        return line
    if args.use_dynamic_batch_size:
        return f"{line}, at most {args.max_tokens_per_gpu} tokens at once"
    return f"{line}, {count(args.micro_batch_size, 'sample')} at once"


def _samples(args: Any) -> str:
    """Return text such as `32 prompts x 8 samples = 256`."""
    prompts, samples = args.rollout_batch_size, args.n_samples_per_prompt
    return f"{count(prompts, 'prompt')} x {count(samples, 'sample')} = {prompts * samples}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))


def optimizer(draft: Draft) -> None:
    name, trainer = draft.optimizer, draft.train_backend
    if trainer not in OPTIMIZERS[name].trainers:
        raise ValueError(
            f"--optimizer {name} with --train-backend {trainer}: an update needs whole matrices, and "
            f"{trainer}'s optimizer holds flat pieces of them; use --train-backend "
            f"{' or '.join(OPTIMIZERS[name].trainers)}, or --optimizer adam."
        )
    if name != "muon":
        return
    for given, flag_name, why in (
        (draft.fsdp_cpu_offload, "fsdp_cpu_offload", "the products of an update would run on the CPU"),
        (
            draft.tensor_model_parallel_size > 1,
            "tensor_model_parallel_size",
            "not shown to be exact",
        ),
        (draft.fsdp_shard_size is not None, "fsdp_shard_size", "not shown to be exact"),
    ):
        if given:
            option = option_of(flag_name)
            raise ValueError(f"--optimizer muon with {option}: {why}; remove {option}, or use adam.")


def learning_rate(draft: Draft) -> None:
    if draft.min_lr > draft.lr:
        raise ValueError(f"--min-lr is {draft.min_lr:g}, more than --lr {draft.lr:g}; use less.")
    if draft.lr_decay_iters is None and draft.num_rollout:
        steps = draft.num_rollout * draft.num_steps_per_rollout
        draft.derive("lr_decay_iters", steps, "optimizer steps of the whole run")
    if draft.lr_warmup_fraction and draft.lr_warmup_iters:
        raise ValueError(
            "--lr-warmup-fraction and --lr-warmup-iters both set the length of the warm-up; keep one of them."
        )
    decays = draft.lr_decay_style != "constant" and draft.lr_decay_iters is not None
    if decays and draft.lr_warmup_iters >= draft.lr_decay_iters:
        raise ValueError(
            f"--lr-warmup-iters is {draft.lr_warmup_iters}, but the schedule ends after "
            f"{draft.lr_decay_iters} optimizer steps; warm up for fewer."
        )
