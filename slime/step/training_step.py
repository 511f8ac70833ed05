"""The training step: `TrainingStep.run` performs everything from one batch to the optimizer updates."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slime.algorithms.advantages import AdvantageInputs, compute_advantages, masked_moments, whiten
from slime.algorithms.kl import compute_approx_kl
from slime.arguments import Flags
from slime.backends.base import Denominators, NonFiniteStepError, StepPlace
from slime.backends.shared.microbatch import build_micro_batches
from slime.backends.shared.model_roles import (
    has_advantages,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
)
from slime.backends.shared.old_policy import OldPolicy
from slime.backends.shared.trainer_base import TrainBackend
from slime.batch.split import RankData, RankStep
from slime.catalog.loss_types import has_rewards
from slime.catalog.policy_losses import REDUCTIONS
from slime.observability.tracer import Tracer
from slime.step import teacher_kl
from slime.step.agreement import Agreement, LogProbs
from slime.step.assertions import check_step
from slime.step.critic import train_critic
from slime.step.losses import build_loss
from slime.step.profiling import ACTOR, LOG_PROBS, StepProfiler
from slime.step.silent import set_apart
from slime.step.step_report import (
    RATED_PASSES,
    StepReport,
    mean_over_steps,
    perf_metrics,
    rollout_metrics,
    step_metrics,
)
from slime.step.token_terms import TokenWatch, check_on_policy, save_nonfinite
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call
from slime.utils.types import RolloutBatch, TokenKey

logger = logging.getLogger(__name__)

# Losses whose samples an engine drew from the policy.
SAMPLED_LOSSES = ("policy_loss", "custom_loss")
# Lists of the batch that a loss may read per token.
LOSS_TOKENS: tuple[TokenKey, ...] = (
    *("advantages", "returns", "log_probs", "ref_log_probs", "rollout_log_probs", "opd_reverse_kl"),
    *("teacher_hidden", "teacher_top_ids", "teacher_top_log_probs"),
)


class TrainingStep:
    """Trains every model of a run on this rank's share of a batch, together with all other ranks.

    Plug-ins get these `args`, and the batch as a dict that they may change.
    """

    def __init__(
        self,
        backend: TrainBackend,
        args: Flags,
        rollout_id: int,
        share: RankData,
        *,
        weight_version: int | None = None,  # as engines know the current weights; None: they do not
        kept: OldPolicy | None = None,  # weights of older versions; None: the loss needs none
        agreement: Agreement | None = None,  # findings of the run so far; None: this is its first batch
        profiler: StepProfiler | None = None,  # None: nothing is recorded
    ) -> None:
        self.backend, self.args, self.rollout_id = backend, args, rollout_id
        self.batch: RolloutBatch = share.batch.copy()  # the keys that the step adds are its own
        self.steps, self._micro_batches = share.steps, share.micro_batches
        self._profiler = profiler or StepProfiler(args, 0)
        self.agreement = agreement or Agreement()
        self.weight_version = weight_version
        self._kept = kept
        self._sampler = "actor"  # tag of the weights that sampled the batch; set when the samples are scored
        self._seconds: dict[str, float] = {}
        self._flops: dict[str, float] = {}  # of this rank, of each pass in RATED_PASSES
        self.histograms: list[dict[str, list[int]]] = []  # of this rank's tokens, for each optimizer step
        self.tracer = Tracer(rollout_id=rollout_id)

    def run(self) -> StepReport:
        """Train on the batch in the right order; called once."""
        with self._timed("train"):
            with self._profiler.part(LOG_PROBS):
                self._score_samples()
            compared = None  # the first optimizer step compares its own samples
            if "log_probs" in self.batch and self._sampler == "actor":
                # One pass computed all samples with the weights that training starts from.
                compared = self._compare(dict(enumerate(self.batch["log_probs"])))
            self._add_advantages()
            self._postprocess()
            metrics = rollout_metrics(
                self.backend,
                self.batch,
                with_rewards=has_rewards(vars(self.args)),
                of_correct=self.args.log_correct_samples,
            )
            if self.args.reset_optimizer_states:
                self.backend.reset_optimizer()
            with self._timed("actor_train"), self._profiler.part(ACTOR):
                steps = [self._optimizer_step(index, step, compared) for index, step in enumerate(self.steps)]
            interval = self.args.ref_update_interval
            if interval and (self.rollout_id + 1) % interval == 0:
                self.backend.copy_weights("actor", "ref")
        if self.args.save_debug_train_data:
            _save_batch(self.args.save_debug_train_data, self.rollout_id, self.batch)
        metrics |= {k: v for k, v in mean_over_steps(steps).items() if not k.startswith("train/")}
        metrics |= perf_metrics(self.backend, self.batch, self._seconds, self._flops)
        return StepReport(metrics, steps, self.agreement.hints.drain())

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if name in RATED_PASSES:
            self.backend.drain_flops()  # those of passes before it
        with self.tracer.span(name) as span:
            yield
        if name in RATED_PASSES:
            self._flops[name] = self.backend.drain_flops()
        self._seconds[name] = span.seconds

    # -- before training: what models say about the samples, and the advantages

    def _score_samples(self) -> None:
        """Add what models say about the samples without a gradient, where this run needs it.

        These are `values` of the critic, log-probs of teacher and reference, and `log_probs` and `entropy` of
        the old policy: the weights that sampled the batch.
        """
        args, batch, backend = self.args, self.batch, self.backend
        if not (has_advantages(args) or needs_reference(args)):
            return
        if self._kept is not None:
            self._sampler = self._kept.tag_of(batch, self.weight_version)
        _require_rollout_log_probs(args, batch)
        needs_old = needs_old_log_probs(args, len(self.steps))
        if not (needs_old or needs_reference(args) or needs_critic(args) or args.use_opd):
            return
        mbs = build_micro_batches(batch, self._micro_batches, replay=args.use_rollout_routing_replay)
        if needs_critic(args):
            with self._timed("values"):
                batch["values"] = backend.values(mbs)
        if args.use_opd and args.opd_type == "trainer":
            with self._timed("teacher_log_probs"):
                teacher_kl.add_teacher(backend, mbs, batch, full_kl=teacher_kl.wants_full_kl(args))
        elif args.use_opd:
            teacher_kl.require_teacher_log_probs(args, batch)
        if needs_reference(args):
            with self._timed("ref_log_probs"):
                batch["ref_log_probs"] = backend.log_probs(mbs, weights="ref").log_probs
        if needs_old:
            with self._timed("log_probs"):
                result = backend.log_probs(mbs, weights=self._sampler, entropy=args.use_rollout_entropy)
                batch["log_probs"] = result.log_probs
                if result.entropy is not None:
                    batch["entropy"] = result.entropy

    def _compare(self, log_probs: LogProbs | None) -> dict[str, float]:
        return self.agreement.check(self.backend, self.args, self.batch, log_probs, self.weight_version)

    def _add_advantages(self) -> None:
        """Add `kl`, `advantages` and `returns`, if rewards become advantages."""
        args, batch = self.args, self.batch
        if not has_advantages(args):
            return
        old = batch.get("rollout_log_probs") if args.use_rollout_logprobs else batch.get("log_probs")
        if args.kl_coef != 0:
            assert old is not None, "a pass before training records the old log-probs for --kl-coef"
            pairs = zip(old, batch["ref_log_probs"], strict=True)
            batch["kl"] = [compute_approx_kl(lp, ref, args.kl_loss_type) for lp, ref in pairs]
        else:
            lengths = batch["response_lengths"]
            batch["kl"] = list(torch.zeros(sum(lengths)).split(list(lengths)))
        if args.custom_advantage_function_path:
            _call_custom_advantages(args, batch, args.custom_advantage_function_path)
        else:
            inputs = AdvantageInputs(
                rewards=batch["rewards"],
                kl=batch["kl"],
                loss_masks=batch["loss_masks"],
                kl_coef=args.kl_coef,
                gamma=args.gamma,
                lambd=args.lambd,
                values=batch.get("values"),
                token_rewards=batch.get("token_rewards"),
            )
            batch["advantages"], batch["returns"] = compute_advantages(args.advantage_estimator, inputs)
        if args.use_opd:
            teacher_kl.add_reverse_kl(args, batch, old)
        if args.normalize_advantages:
            moments = self.backend.sum_over_ranks(masked_moments(batch["advantages"], batch["loss_masks"]))
            batch["advantages"] = whiten(batch["advantages"], moments)

    def _postprocess(self) -> None:
        """Let the user's hook edit the batch last."""
        path = self.args.rollout_data_postprocess_path
        if path:
            with plugin_call("--rollout-data-postprocess-path", path, lambda: f"rollout {self.rollout_id}"):
                load_function(path)(self.args, self.rollout_id, self.batch)
        if self.args.loss_type == "policy_loss" and "advantages" not in self.batch:
            raise ValueError(
                "--disable-compute-advantages-and-returns: the samples have no advantages for --loss-type "
                "policy_loss; set rollout_data['advantages'] in --rollout-data-postprocess-path."
            )

    # -- training

    def _optimizer_step(
        self, index: int, step: RankStep, compared: dict[str, float] | None
    ) -> dict[str, float]:
        """One optimizer step of the critic, if there is one, and of the actor, after --num-critic-only-steps.

        The first also compares engine and trainer, unless a pass before did: later ones have newer weights.
        """
        args, watch = self.args, TokenWatch()
        if args.use_stateless_adam:
            self.backend.reset_optimizer()
        metrics = self._train_critic(index, step) if needs_critic(args) else {}
        if not needs_critic(args) or self.rollout_id >= args.num_critic_only_steps:
            metrics |= self._train_actor(index, step, watch)
        if index == 0 and compared is not None:
            metrics |= compared
        elif index == 0 and args.loss_type in SAMPLED_LOSSES and "train/nonfinite_steps" not in metrics:
            metrics |= self._compare(watch.log_probs() if args.loss_type == "policy_loss" else None)
        if "train/empty_steps" in metrics:
            self._report_empty_step(index, step)
        return metrics

    def _train_critic(self, index: int, step: RankStep) -> dict[str, float]:
        args, watch = self.args, TokenWatch()
        try:
            clip, per_token = args.value_clip, args.calculate_per_token_loss
            return train_critic(self.backend, self.batch, step, watch, value_clip=clip, per_token=per_token)
        except NonFiniteStepError as error:
            self._report_nonfinite(f"rollout_{self.rollout_id}_step_{index}_critic", step, watch, error)
            return {"train/critic-nonfinite_steps": 1.0}

    def _train_actor(self, index: int, step: RankStep, watch: TokenWatch) -> dict[str, float]:
        """One optimizer step with the checks around it; one that is not finite is not applied."""
        args, batch, backend = self.args, self.batch, self.backend
        tokens = _token_lists(args, batch)
        replay = args.use_rollout_routing_replay
        micro_batches, learns = set_apart(args, backend.layout, batch, step.micro_batches)
        mbs = build_micro_batches(batch, micro_batches, tokens, replay=replay)
        mbs = [replace(mb, learns=own) for mb, own in zip(mbs, learns, strict=True)]
        denominators = Denominators(
            step.num_rollouts, step.num_tokens, step.num_samples, per=REDUCTIONS[args.loss_reduction].count
        )
        loss = build_loss(args, batch, watch)
        if args.use_opd:
            loss = teacher_kl.with_distillation(loss, backend, args)
        try:
            stats = backend.train_step(mbs, loss, denominators, place=StepPlace(self.rollout_id, index))
        except NonFiniteStepError as error:
            self._report_nonfinite(f"rollout_{self.rollout_id}_step_{index}", step, watch, error)
            return {"train/nonfinite_steps": 1.0}
        recorded_now = "log_probs" in batch and not (args.use_rollout_logprobs or args.keep_old_actor)
        checked = args.loss_type == "policy_loss" and not args.skip_on_policy_check
        if index == 0 and recorded_now and checked:
            check_on_policy(backend, stats, step.num_tokens)
        metrics = step_metrics(stats, step)
        self.histograms.append(watch.histograms() if args.loss_type == "policy_loss" else {})
        check_step(args, backend, self.rollout_id, index, metrics)
        return metrics

    def _report_nonfinite(
        self, name: str, step: RankStep, watch: TokenWatch, error: NonFiniteStepError
    ) -> None:
        """Save the samples of a step that was not applied; raise if --nonfinite-action is `stop`."""
        folder = Path(self.args.run_dir) / "nonfinite"
        report = save_nonfinite(self.backend, folder, name, self.batch, step.positions, watch, error)
        if self.args.nonfinite_action == "stop":
            raise NonFiniteStepError(f"{error} {report}") from error
        logger.warning("%s %s", error, report)

    def _report_empty_step(self, index: int, step: RankStep) -> None:
        cause = "every one was rejected" if step.num_tokens else "every loss mask is 0"
        cause = f"no token trains, {cause}"
        self.agreement.hints.log_once(
            f"empty step: {cause}",
            f"rollout {self.rollout_id}: optimizer step {index} is not applied, {cause}. Weights, optimizer "
            "and learning-rate schedule stay as they are; train/empty_steps counts such steps.",
        )


def _require_rollout_log_probs(args: Flags, batch: RolloutBatch) -> None:
    for flag in ("use_rollout_logprobs", "use_tis", "use_rs", "get_mismatch_metrics"):
        if getattr(args, flag) and "rollout_log_probs" not in batch:
            hint = " Asynchronous runs choose it by default; --no-use-tis trains without."
            raise ValueError(
                f"--{flag.replace('_', '-')}: the rollout recorded no log-probs; return them with each "
                f"sample.{hint if flag == 'use_tis' else ''}"
            )


def _call_custom_advantages(args: Flags, batch: RolloutBatch, path: str) -> None:
    """Call the user's advantage function; check for one value per response token of each sample."""
    with plugin_call("--custom-advantage-function-path", path):
        load_function(path)(args, batch)
    if "advantages" not in batch:
        raise ValueError(f"--custom-advantage-function-path {path} set no rollout_data['advantages'].")
    for key, lists in (("advantages", batch["advantages"]), ("returns", batch.get("returns"))):
        for position, values in enumerate(lists or ()):
            if len(values) != batch["response_lengths"][position]:
                raise ValueError(
                    f"--custom-advantage-function-path {path}: {key} of sample "
                    f"{batch['sample_indices'][position]} has {len(values)} values for "
                    f"{batch['response_lengths'][position]} response tokens."
                )


def _save_batch(template: str, rollout_id: int, batch: RolloutBatch) -> None:
    """Save what this rank trained on, with all values computed from it (--save-debug-train-data)."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    file = Path(template.format(rollout_id=rollout_id, rank=rank)).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "rank": rank, "rollout_data": dict(batch)}, file)


def _token_lists(args: Flags, batch: RolloutBatch) -> dict[str, list[Tensor]]:
    """Return the per-response-token tensors of the micro-batches, by name."""
    lists: dict[str, list[Tensor] | None] = {key: batch.get(key) for key in LOSS_TOKENS}
    if args.loss_type == "policy_loss":
        # Ratios are relative to these log-probs; without any, every ratio is 1.
        lists["old_log_probs"] = lists["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
    return {key: values for key, values in lists.items() if values is not None}
