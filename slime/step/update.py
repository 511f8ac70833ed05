"""The order of one training step: reference and old log-probs, advantages, optimizer steps, metrics."""

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.algorithms.advantages import AdvantageInputs, compute_advantages, masked_moments, whiten
from slime.algorithms.covariance import select_clip_cov, select_kl_cov
from slime.algorithms.kl import compute_approx_kl
from slime.arguments import Args
from slime.backends.base import Denominators, NonFiniteStepError, StepPlace, StepStats, TrainBackend
from slime.backends.shared.microbatch import build_micro_batches
from slime.backends.shared.old_policy import KeptVersions
from slime.backends.shared.roles import has_advantages, needs_critic, needs_reference
from slime.batch.schedule import RankData, RankStep
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS
from slime.step import critic_and_teacher
from slime.step.agreement import Agreement, LogProbs
from slime.step.hints import Hints
from slime.step.losses import build_loss
from slime.step.policy import tis_scale
from slime.step.watch import TokenWatch, check_on_policy, save_nonfinite
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call
from slime.utils.types import RolloutBatch, is_score

logger = logging.getLogger(__name__)

PER_TOKEN_METRICS = (
    *("log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"),
    *("returns", "advantages", "values", "entropy", "kl", "opd_reverse_kl"),
)
# Losses whose samples an engine drew from the policy.
SAMPLED_LOSSES = ("policy_loss", "custom_loss")
# Parts of the loss are reported as they are minimised; all else of a
# policy step is a mean over what is trained.
LOSS_TERMS = ("loss", "pg_loss", "kl_loss")
STEPS_NOT_APPLIED = ("nonfinite_steps", "empty_steps")
PER_SAMPLE_METRICS = ("rewards", "raw_reward", "truncated", "response_lengths")


def run_update(
    backend: TrainBackend,
    args: Args,
    rollout_id: int,
    rank_data: RankData,
    *,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    weight_version: int | None = None,
    kept: KeptVersions | None = None,
    agreement: Agreement | None = None,
) -> dict[str, float]:
    """Train on one rollout's share of this rank and return metrics, the same on all ranks.

    `train/*` are means over the optimizer steps; `on_step(step, metrics)` sees each step as it ends.
    `weight_version` is the version under which the engines know the current weights; None: they do not.
    `kept` has those of older versions, `agreement` remembers over rollouts what it told. Functions of the
    user's get `args` as it is given here.
    """
    started = time.perf_counter()
    batch: RolloutBatch = dict(rank_data.batch)
    seconds: dict[str, float] = {}
    sampler = "actor"
    if has_advantages(args) or needs_reference(args):
        sampler = "actor" if kept is None else kept.tag_of(batch, weight_version)
        seconds |= _add_passes(backend, args, rank_data, batch, sampler)
    agreement = agreement or Agreement()
    compare = functools.partial(agreement.check, backend, args, batch, version=weight_version)
    # Under the weights that training starts from a pass saw all samples; else the first step sees its own.
    compared = (
        compare(dict(enumerate(batch["log_probs"]))) if "log_probs" in batch and sampler == "actor" else None
    )
    if has_advantages(args):
        _add_advantages(backend, args, batch)
    if args.rollout_data_postprocess_path:
        path = args.rollout_data_postprocess_path
        with plugin_call("--rollout-data-postprocess-path", path, lambda: f"rollout {rollout_id}"):
            load_function(path)(args, rollout_id, batch)
    if args.loss_type == "policy_loss" and "advantages" not in batch:
        raise ValueError(
            "--disable-compute-advantages-and-returns: the samples have no advantages for --loss-type "
            "policy_loss; set rollout_data['advantages'] in --rollout-data-postprocess-path."
        )
    metrics = _rollout_metrics(backend, batch)
    if "values" in batch and "returns" in batch:
        metrics["rollout/explained_variance"] = critic_and_teacher.explained_variance(backend, batch)
    if args.reset_optimizer_states:
        backend.reset_optimizer()
    train_started = time.perf_counter()
    steps = []
    for index, step in enumerate(rank_data.steps):
        watch = TokenWatch()
        steps.append(_train_all(backend, args, rollout_id, batch, step, index, watch))
        if index == 0:  # after it the weights are newer
            steps[0] |= _compare_first(args, compare, watch, steps[0]) if compared is None else compared
        if "train/empty_steps" in steps[-1]:
            _tell_of_empty_step(agreement.hints, rollout_id, index, step)
        if on_step is not None:
            on_step(index, steps[-1])
    seconds["actor_train"] = time.perf_counter() - train_started
    metrics |= _means(steps)
    if args.ref_update_interval and (rollout_id + 1) % args.ref_update_interval == 0:
        backend.copy_weights("actor", "ref")
    seconds["train"] = time.perf_counter() - started
    return metrics | _perf_metrics(backend, batch, seconds)


def _compare_first(
    args: Args,
    compare: Callable[[LogProbs | None], dict[str, float]],
    watch: TokenWatch,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Engine against trainer, by what the first step of a rollout saw of its own samples."""
    if args.loss_type not in SAMPLED_LOSSES or "train/nonfinite_steps" in metrics:
        return {}
    return compare(watch.log_probs() if args.loss_type == "policy_loss" else None)


def _tell_of_empty_step(hints: Hints, rollout_id: int, index: int, step: RankStep) -> None:
    cause = (
        "no token trains, every one was rejected"
        if step.num_tokens
        else "no token trains, every loss mask is 0"
    )
    hints.tell(
        f"empty step: {cause}",
        f"rollout {rollout_id}: optimizer step {index} is not applied, {cause}. Weights, optimizer and "
        "learning-rate schedule stay as they are; train/empty_steps counts such steps.",
    )


def needs_old_log_probs(args: Args, num_steps: int) -> bool:
    """Whether a pass before training must record the old policy's log-probs.

    Not when the engine's stand in for them, and not for one step on the policy's own samples: there the ratio
    is 1. A loss of the user's own gets them beside its advantages.
    """
    if args.loss_type == "custom_loss":
        return has_advantages(args) and not args.use_rollout_logprobs
    if args.loss_type != "policy_loss":
        return False
    if args.use_rollout_entropy:
        return True
    if args.use_rollout_logprobs:
        return False
    if num_steps > 1 or args.kl_coef != 0 or args.keep_old_actor or args.use_opd or args.tis_batch_normalize:
        return True
    return POLICY_LOSSES[args.policy_loss_type].selects_by_covariance


def _add_passes(
    backend: TrainBackend, args: Args, rank_data: RankData, batch: RolloutBatch, sampler: str
) -> dict[str, float]:
    """Add what the models say about the samples, where this run needs it; returns seconds by pass.

    `values` of the critic, `ref_log_probs`, `teacher_log_probs`, and `log_probs` and `entropy` of the old
    policy, under the weights tagged `sampler`.
    """
    for flag in ("use_rollout_logprobs", "use_tis", "use_rs", "get_mismatch_metrics"):
        if getattr(args, flag) and "rollout_log_probs" not in batch:
            without = (
                " Asynchronous runs choose it by default; --no-use-tis trains without."
                if flag == "use_tis"
                else ""
            )
            raise ValueError(
                f"--{flag.replace('_', '-')}: the rollout recorded no log-probs; return them with each "
                f"sample.{without}"
            )
    needs_old = needs_old_log_probs(args, len(rank_data.steps))
    if not (needs_old or needs_reference(args) or needs_critic(args) or args.use_opd):
        return {}
    all_positions = [micro_batch for step in rank_data.steps for micro_batch in step.micro_batches]
    mbs = build_micro_batches(batch, all_positions, replay=args.use_rollout_routing_replay)
    seconds = {}
    if needs_critic(args):
        started = time.perf_counter()
        batch["values"] = backend.values(mbs)
        seconds["values"] = time.perf_counter() - started
    if args.use_opd:
        seconds |= critic_and_teacher.add_teacher(backend, args, mbs, batch)
    if needs_reference(args):
        started = time.perf_counter()
        batch["ref_log_probs"] = backend.log_probs(mbs, weights="ref").log_probs
        seconds["ref_log_probs"] = time.perf_counter() - started
    if needs_old:
        started = time.perf_counter()
        result = backend.log_probs(mbs, weights=sampler, entropy=args.use_rollout_entropy)
        batch["log_probs"] = result.log_probs
        if result.entropy is not None:
            batch["entropy"] = result.entropy
        seconds["log_probs"] = time.perf_counter() - started
    return seconds


def _add_advantages(backend: TrainBackend, args: Args, batch: RolloutBatch) -> None:
    """Add `kl`, `advantages` and `returns`."""
    old = batch.get("rollout_log_probs") if args.use_rollout_logprobs else batch.get("log_probs")
    if args.kl_coef != 0:
        pairs = zip(old, batch["ref_log_probs"], strict=True)
        batch["kl"] = [compute_approx_kl(lp, ref, args.kl_loss_type) for lp, ref in pairs]
    else:
        batch["kl"] = [torch.zeros(length) for length in batch["response_lengths"]]
    if args.custom_advantage_function_path:
        with plugin_call("--custom-advantage-function-path", args.custom_advantage_function_path):
            load_function(args.custom_advantage_function_path)(args, batch)
        if "advantages" not in batch:
            raise ValueError(
                f"--custom-advantage-function-path {args.custom_advantage_function_path} set no "
                "rollout_data['advantages']."
            )
    else:
        inputs = AdvantageInputs(
            rewards=batch["rewards"],
            kl=batch["kl"],
            loss_masks=batch["loss_masks"],
            kl_coef=args.kl_coef,
            gamma=args.gamma,
            lambd=args.lambd,
            values=batch.get("values"),
        )
        batch["advantages"], batch["returns"] = compute_advantages(args.advantage_estimator, inputs)
    _check_token_lists(args, batch)
    if args.use_opd:
        critic_and_teacher.add_reverse_kl(args, batch, old)
    if args.normalize_advantages:
        moments = backend.sum_over_ranks(masked_moments(batch["advantages"], batch["loss_masks"]))
        batch["advantages"] = whiten(batch["advantages"], moments)


def _check_token_lists(args: Args, batch: RolloutBatch) -> None:
    """What a custom advantage function set has one value per response token of each sample."""
    for key in ("advantages", "returns"):
        for position, values in enumerate(batch.get(key) or ()):
            if len(values) != batch["response_lengths"][position]:
                raise ValueError(
                    f"--custom-advantage-function-path {args.custom_advantage_function_path}: {key} of "
                    f"sample {batch['sample_indices'][position]} has {len(values)} values for "
                    f"{batch['response_lengths'][position]} response tokens."
                )


def _token_keys(args: Args, batch: RolloutBatch) -> list[str]:
    wanted = (
        *(
            "advantages",
            "returns",
            "log_probs",
            "ref_log_probs",
            "rollout_log_probs",
            "old_log_probs",
            "selected",
        ),
        *("opd_reverse_kl", "teacher_hidden", "tis_scale"),
    )
    return [key for key in wanted if key in batch]


def _train_all(
    backend: TrainBackend,
    args: Args,
    rollout_id: int,
    batch: RolloutBatch,
    step: RankStep,
    index: int,
    watch: TokenWatch,
) -> dict[str, float]:
    """One optimizer step of every model that trains: the critic, then,
    after --num-critic-only-steps, the actor.
    """
    metrics: dict[str, float] = {}
    if needs_critic(args):
        critic_watch = TokenWatch()
        try:
            metrics = critic_and_teacher.train_critic(backend, args, batch, step, critic_watch)
        except NonFiniteStepError as error:
            name = f"rollout_{rollout_id}_step_{index}_critic"
            _report_nonfinite(backend, args, name, batch, step, critic_watch, error)
            metrics = {"train/critic-nonfinite_steps": 1.0}
        if rollout_id < args.num_critic_only_steps:
            return metrics
    return metrics | _train(backend, args, rollout_id, batch, step, index, watch)


def _train(
    backend: TrainBackend,
    args: Args,
    rollout_id: int,
    batch: RolloutBatch,
    step: RankStep,
    index: int,
    watch: TokenWatch,
) -> dict[str, float]:
    """One optimizer step with the checks around it; a step that is not finite is reported and not applied."""
    old = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if args.loss_type == "policy_loss" and old in batch:
        batch = {**batch, "old_log_probs": batch[old]}
    if args.loss_type == "policy_loss" and POLICY_LOSSES[args.policy_loss_type].selects_by_covariance:
        batch = {**batch, "selected": _select_tokens(backend, args, rollout_id, batch, step)}
    if args.loss_type == "policy_loss" and args.tis_batch_normalize:
        positions = [position for micro_batch in step.micro_batches for position in micro_batch]
        batch = {**batch, "tis_scale": tis_scale(args, backend, batch, positions)}
    replay = args.use_rollout_routing_replay
    mbs = build_micro_batches(batch, step.micro_batches, _token_keys(args, batch), replay=replay)
    denominators = Denominators(
        step.num_rollouts, step.num_tokens, step.num_samples, per=REDUCTIONS[args.loss_reduction].count
    )
    loss = build_loss(args, batch, watch)
    if args.use_opd:
        loss = critic_and_teacher.with_distillation(loss, backend, args)
    try:
        stats = backend.train_step(mbs, loss, denominators, place=StepPlace(rollout_id, index))
    except NonFiniteStepError as error:
        _report_nonfinite(backend, args, f"rollout_{rollout_id}_step_{index}", batch, step, watch, error)
        return {"train/nonfinite_steps": 1.0}
    metrics = _step_metrics(stats, step)
    if args.loss_type == "policy_loss" and index == 0:
        recorded_now = old == "log_probs" and "log_probs" in batch and not args.keep_old_actor
        if recorded_now and not args.skip_on_policy_check:
            check_on_policy(backend, stats, step.num_tokens)
    return metrics


def _report_nonfinite(
    backend: TrainBackend,
    args: Args,
    name: str,
    batch: RolloutBatch,
    step: RankStep,
    watch: TokenWatch,
    error: NonFiniteStepError,
) -> None:
    """Save the samples of a step that was not applied; raises unless --nonfinite-action says to go on."""
    positions = [p for micro_batch in step.micro_batches for p in micro_batch]
    report = save_nonfinite(backend, args, name, batch, positions, watch, error)
    if args.nonfinite_action == "stop":
        raise NonFiniteStepError(f"{error} {report}") from error
    logger.warning("%s %s", error, report)


def _select_tokens(
    backend: TrainBackend, args: Args, rollout_id: int, batch: RolloutBatch, step: RankStep
) -> list[Tensor]:
    """The tokens of this step that a covariance loss treats apart,
    as 0/1 per response token of every sample.
    """
    positions = [p for micro_batch in step.micro_batches for p in micro_batch]
    old = batch["old_log_probs"]
    lists = [[values[p] for p in positions] for values in (batch["advantages"], old, batch["loss_masks"])]
    if args.policy_loss_type == "kl_cov":
        chosen = select_kl_cov(*lists, ratio=args.kl_cov_ratio, total=backend.sum_over_ranks)
    else:
        seeds = [hash((args.seed, rollout_id, batch["sample_indices"][p])) & 0x7FFFFFFF for p in positions]
        chosen = select_clip_cov(
            *lists,
            ratio=args.clip_cov_ratio,
            low=args.clip_cov_low,
            high=args.clip_cov_high,
            seeds=seeds,
            total=backend.sum_over_ranks,
        )
    selected = [torch.zeros(length) for length in batch["response_lengths"]]
    for position, values in zip(positions, chosen, strict=True):
        selected[position] = values
    return selected


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the steps that have it; steps that were not applied are counted."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / (1 if name.endswith(STEPS_NOT_APPLIED) else len(values))
    return means


def _step_metrics(stats: StepStats, step: RankStep) -> dict[str, float]:
    # Rollouts without a trained token are in the denominator of the loss, but say nothing about the policy.
    counted = stats.metrics.get("_counted") or 1.0
    metrics = {
        f"train/{name}": value if name in LOSS_TERMS or name.startswith("moe_") else value / counted
        for name, value in stats.metrics.items()
        if not name.startswith("_")
    }
    if stats.metrics.get("_ratio_square"):
        # (sum w)^2 / (n sum w^2) of the engine's tokens: the share of them that the batch is worth.
        metrics["train/ess"] = stats.metrics["_ratio"] ** 2 / (
            stats.metrics["_ratio_square"] * stats.metrics["_ratio_count"]
        )
    metrics["train/grad_norm"] = stats.grad_norm
    for i, rate in enumerate(stats.learning_rates):
        metrics[f"train/lr-pg_{i}"] = rate
    if not stats.applied:
        metrics["train/empty_steps"] = 1.0
    metrics["train/global_batch_size"] = step.num_rollouts
    metrics["perf/optimizer_time"] = stats.optimizer_s
    return metrics


def _rollout_metrics(backend: TrainBackend, batch: RolloutBatch) -> dict[str, float]:
    """Means over all ranks: of per-token lists over rollouts with trained
    tokens, of per-sample numbers over samples.
    """
    ones = [torch.ones(len(mask)) for mask in batch["loss_masks"]]
    sums = {
        "samples": float(len(batch["tokens"])),
        "trained": _sum_of_rollout_means(ones, batch["loss_masks"], batch["rollout_mask_sums"]),
    }
    for key in PER_TOKEN_METRICS:
        if key in batch:
            sums[key] = _sum_of_rollout_means(batch[key], batch["loss_masks"], batch["rollout_mask_sums"])
    for key in PER_SAMPLE_METRICS:
        if key in batch:
            sums[key] = float(sum(value for value in batch[key] if is_score(value)))
    sums["total_lengths"] = float(sum(len(tokens) for tokens in batch["tokens"]))
    totals = backend.sum_over_ranks(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    total = dict(zip(sums, totals, strict=True))
    samples, trained = max(total.pop("samples"), 1.0), total.pop("trained") or 1.0
    return {
        f"rollout/{key}": value / (trained if key in PER_TOKEN_METRICS else samples)
        for key, value in total.items()
    }


def _sum_of_rollout_means(
    values: Sequence[Tensor], masks: Sequence[Tensor], mask_sums: Sequence[float]
) -> float:
    if not values:
        return 0.0
    lengths = torch.tensor([len(mask) for mask in masks])
    weights = torch.cat(list(masks)).double() / torch.repeat_interleave(
        torch.tensor(mask_sums, dtype=torch.float64).clamp(min=1.0), lengths
    )
    return float((torch.cat(list(values)).double() * weights).sum())


def _perf_metrics(backend: TrainBackend, batch: RolloutBatch, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, and the trainer's rates; a training pass counts as three forward passes."""
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    lengths = [len(tokens) for tokens in batch["tokens"]]
    work = torch.tensor([sum(lengths), backend.forward_flops(lengths)], dtype=torch.float64)
    tokens, flops = backend.sum_over_ranks(work).tolist()
    metrics["perf/actor_train_tok_per_s"] = tokens / max(seconds["actor_train"], 1e-9)
    for name, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        if name in seconds:
            per_rank = passes * flops / backend.layout.dp_size
            metrics[f"perf/{name}_tflops"] = per_rank / max(seconds[name], 1e-9) / 1e12
    return metrics
