"""Rules that span flags, in the order they run: each refuses a combination
with a reason and a fix, or derives a value.
"""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name

from slime.arguments.core.devices import visible_gpus
from slime.arguments.core.draft import Draft
from slime.arguments.core.paths import check_paths_exist
from slime.arguments.groups.algorithm_rules import (
    group_normalisation,
    loss_reduction,
    off_policy,
    policy_loss,
    reference_model,
    reward_shaping,
)
from slime.arguments.groups.batch import derive_batch
from slime.arguments.groups.data import DEFAULT_DATA_SOURCE
from slime.arguments.groups.eval_datasets import resolve_eval_datasets
from slime.arguments.groups.fp8_rules import engine_precision
from slime.arguments.groups.kept_models import kept_models
from slime.arguments.groups.machine import tell_of_this_machine
from slime.arguments.groups.megatron_rules import megatron_trainer
from slime.arguments.groups.objective_rules import distillation, preference_pairs
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.placement import derive_offload, derive_sizes
from slime.arguments.groups.precision import derive_precision
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.arguments.groups.rollout_rules import fully_async_rollout
from slime.arguments.groups.stale_tokens import correct_stale_tokens
from slime.arguments.groups.topology_rules import router, topology, topology_source
from slime.arguments.groups.trained_sampling import trained_sampling
from slime.arguments.groups.trainer_rules import model_parallel_sizes, trainable_parameters, weight_copies
from slime.arguments.groups.weight_sync_rules import weight_sync
from slime.arguments.no_effect import refuse_flags_without_effect
from slime.catalog.datasets import ENDINGS
from slime.catalog.engines import DEFAULT_ENGINE, ENGINES
from slime.catalog.rewards import BOXED, REWARDS
from slime.utils.run_file import choose_run_folder, resumption_of

Rule = Callable[[Draft], None]


def apply_rules(draft: Draft) -> None:
    """Run every rule once. A rule may rely on what the rules before it derived."""
    for rule in RULES:
        rule(draft)


def debug_modes(draft: Draft) -> None:
    if draft.load_debug_rollout_data and not draft.debug_train_only:
        draft.derive("debug_train_only", True, "replayed dumps (load_debug_rollout_data) need no engines")
    if draft.debug_rollout_only and draft.debug_train_only:
        why = (
            "--load-debug-rollout-data implies --debug-train-only"
            if draft.load_debug_rollout_data
            else "both are set"
        )
        raise ValueError(
            f"--debug-rollout-only and --debug-train-only leave nothing to run ({why}); keep one of them."
        )


def needed_flags(draft: Draft) -> None:
    if draft.rollout_batch_size is None:
        raise ValueError(
            "--rollout-batch-size is required: how many prompts make one rollout, for example 32."
        )
    own_rollout = draft.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
    if draft.hf_checkpoint is None and not (draft.debug_rollout_only and own_rollout):
        raise ValueError(
            "--hf-checkpoint is required: the folder or hub id of the model, for example Qwen/Qwen3-0.6B."
        )
    asks_engines = not own_rollout and draft.custom_generate_function_path is None
    if asks_engines and draft.debug_train_only and not draft.load_debug_rollout_data:
        raise ValueError(
            "--debug-train-only starts no engines, but the default rollout function asks them for samples; "
            "replay a dump with --load-debug-rollout-data, or use --rollout-function-path "
            "slime.rollout.sft_rollout.generate_rollout."
        )
    own_data = draft.data_source_path != DEFAULT_DATA_SOURCE or not draft.rollout_global_dataset
    if draft.prompt_data is None and not own_data and not draft.load_debug_rollout_data:
        raise ValueError(
            f"--prompt-data is required: a {ENDINGS} file of prompts. "
            "If your rollout function brings its own prompts, say --disable-rollout-global-dataset."
        )
    if asks_engines and not draft.debug_train_only and draft.rollout_max_response_len is None:
        raise ValueError(
            "--rollout-max-response-len is required: without it an engine cuts responses at a default of "
            "its own; give the longest response in tokens."
        )


def sampling(draft: Draft) -> None:
    if not draft.rollout_temperature > 0:
        raise ValueError(
            f"--rollout-temperature is {draft.rollout_temperature:g}: greedy decoding is not a policy RL "
            "can improve; use a value > 0."
        )
    if draft.loss_type in SUPERVISED_LOSSES and draft.rollout_temperature != 1:
        raise ValueError(
            f"--rollout-temperature is {draft.rollout_temperature:g} with --loss-type {draft.loss_type}: "
            "the trainer computes at that temperature, and a supervised loss is that of the model as it "
            "is; use 1 (evaluation has --eval-temperature)."
        )
    if draft.rollout_top_k == 0:
        raise ValueError("--rollout-top-k is 0, which keeps no token at all; use -1 for all tokens.")


def context_length(draft: Draft) -> None:
    limit = draft.rollout_max_context_len
    if limit is not None:
        draft_len = draft.rollout_max_prompt_len
        if draft_len is None:
            draft.derive(
                "rollout_max_prompt_len", limit - 1, "rollout_max_context_len - 1, room for one token"
            )
        elif draft_len > limit - 1:
            raise ValueError(
                f"--rollout-max-prompt-len is {draft_len}, but --rollout-max-context-len is {limit}: a "
                f"prompt must leave room for a response; use at most {limit - 1}."
            )
    if draft.eval_max_context_len is None and limit is not None:
        draft.derive("eval_max_context_len", limit, "same as rollout_max_context_len")


def over_sampling(draft: Draft) -> None:
    if draft.over_sampling_batch_size is None:
        draft.derive("over_sampling_batch_size", draft.rollout_batch_size, "same as rollout_batch_size")
    if draft.over_sampling_batch_size < draft.rollout_batch_size:
        raise ValueError(
            f"--over-sampling-batch-size is {draft.over_sampling_batch_size}, less than --rollout-batch-size "
            f"{draft.rollout_batch_size}: one fetch could not fill a rollout; use at least "
            f"{draft.rollout_batch_size}."
        )


def length_of_run(draft: Draft) -> None:
    if draft.num_rollout is None and draft.num_epoch is None:
        raise ValueError(
            "neither --num-rollout nor --num-epoch is set: say how long to train, for example --num-rollout "
            "100."
        )
    if draft.num_rollout is not None and draft.num_epoch is not None:
        raise ValueError(
            f"--num-rollout is {draft.num_rollout} and --num-epoch is {draft.num_epoch}: both say how long "
            "to train; keep one of them."
        )
    if draft.num_epoch is not None and not draft.rollout_global_dataset:
        raise ValueError(
            "--num-epoch needs the shared dataset to know how long an epoch is; use --num-rollout instead."
        )


def loss(draft: Draft) -> None:
    if draft.loss_type == "custom_loss" and draft.custom_loss_function_path is None:
        raise ValueError("--loss-type custom_loss needs --custom-loss-function-path.")
    brings_advantages = draft.rollout_data_postprocess_path or draft.custom_convert_samples_to_train_data_path
    if (
        draft.loss_type == "policy_loss"
        and not draft.compute_advantages_and_returns
        and not brings_advantages
    ):
        raise ValueError(
            "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; "
            "remove it, or set them in --rollout-data-postprocess-path."
        )
    if draft.loss_type == "sft_loss" and draft.n_samples_per_prompt != 1:
        raise ValueError(
            f"--n-samples-per-prompt is {draft.n_samples_per_prompt} with --loss-type sft_loss: SFT trains "
            "on the given answer, and copies of it add nothing; use 1."
        )
    if draft.advantage_estimator.startswith("reinforce_plus_plus") and not draft.normalize_advantages:
        raise ValueError(f"--advantage-estimator {draft.advantage_estimator} needs --normalize-advantages.")


def micro_batches(draft: Draft) -> None:
    if draft.use_dynamic_batch_size and draft.max_tokens_per_gpu is None:
        raise ValueError(
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: how many tokens fit in one forward and "
            "backward pass."
        )
    if draft.balance_by_flops and not draft.use_dynamic_batch_size:
        raise ValueError(
            "--balance-by-flops balances token-filled micro-batches; it needs --use-dynamic-batch-size."
        )
    if draft.balance_by_flops and not draft.balance_data:
        draft.derive("balance_data", True, "balance_by_flops")


def learning_rate(draft: Draft) -> None:
    if draft.min_lr > draft.lr:
        raise ValueError(
            f"--min-lr is {draft.min_lr:g}, more than --lr {draft.lr:g}: a decay goes down; use less."
        )
    if draft.lr_decay_iters is None and draft.num_rollout:
        steps = draft.num_rollout * draft.num_steps_per_rollout
        draft.derive("lr_decay_iters", steps, "optimizer steps of the whole run")
    decays = draft.lr_decay_style != "constant" and draft.lr_decay_iters is not None
    if decays and draft.lr_warmup_iters >= draft.lr_decay_iters:
        raise ValueError(
            f"--lr-warmup-iters is {draft.lr_warmup_iters}, but the schedule ends after "
            f"{draft.lr_decay_iters} optimizer "
            "steps: no step would be left for the decay; warm up for fewer."
        )


def rewards(draft: Draft) -> None:
    if draft.rm_type is not None:
        name = draft.rm_type.removeprefix(BOXED)
        if name not in REWARDS:
            near = get_close_matches(name, REWARDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(REWARDS)}"
            raise ValueError(f"--rm-type is {draft.rm_type!r}, which is no built-in reward; {hint}")
        if REWARDS[name].is_remote and draft.rm_url is None:
            raise ValueError(f"--rm-type {name} needs --rm-url: the server that scores samples.")
    if draft.eval_reward_key is None and draft.reward_key is not None:
        draft.derive("eval_reward_key", draft.reward_key, "same as reward_key")


def evaluation(draft: Draft) -> None:
    resolve_eval_datasets(draft)
    if draft.eval_function_path is None:
        draft.derive("eval_function_path", draft.rollout_function_path, "same as rollout_function_path")
    own_evaluation = draft.eval_function_path != DEFAULT_ROLLOUT_FUNCTION
    if draft.eval_interval is not None and not draft.eval_datasets and not own_evaluation:
        raise ValueError(
            f"--eval-interval is {draft.eval_interval}, but there is nothing to evaluate on; add "
            "--eval-prompt-data name file or --eval-config."
        )


_CHECKPOINT_FOLDERS = {
    "no_load_optim": "load",
    "no_load_rng": "load",
    "async_save": "save",
    "keep_last_n": "save",
}


def checkpoints(draft: Draft) -> None:
    if draft.save_interval is not None and draft.save is None:
        raise ValueError(
            f"--save-interval is {draft.save_interval}, but there is no folder to save in; add --save DIR."
        )
    for name, needs in _CHECKPOINT_FOLDERS.items():
        if draft.was_given(name) and getattr(draft, name) and getattr(draft, needs) is None:
            raise ValueError(
                f"--{name.replace('_', '-')} does nothing without --{needs}; add it or remove the flag."
            )
    if draft.no_load_verify and not (draft.load or draft.ref_load or draft.opd_teacher_load):
        raise ValueError("--no-load-verify does nothing without --load; add it or remove the flag.")
    for name in ("save_hf", "save_debug_rollout_data", "load_debug_rollout_data"):
        template = getattr(draft, name)
        if template is not None:
            _check_template(f"--{name.replace('_', '-')}", template)


def _check_template(flag: str, template: str) -> None:
    try:
        first, second = (template.format(rollout_id=i, rank=0, role="actor", step_id=0) for i in (0, 1))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{flag} is {template}: not a template ({error}); write {{rollout_id}} where the number goes."
        ) from None
    if first == second:
        raise ValueError(
            f"{flag} is {template}: every rollout would use the same path; put {{rollout_id}} in it."
        )


def engine_choice(draft: Draft) -> None:
    if draft.rollout_engine not in ENGINES:  # auto
        meant = [name for name, row in ENGINES.items() if any(getattr(draft, f) for f in row.chosen_by)]
        engine = meant[0] if meant else DEFAULT_ENGINE
        draft.derive("rollout_engine", engine, ENGINES[engine].chosen_why or "needs nothing")
    kind = ENGINES[draft.rollout_engine]
    if kind.find_python and not draft.debug_train_only and not draft.rollout_external_engine_addrs:
        given, reason = getattr(draft, kind.python_flag), f"--rollout-engine {draft.rollout_engine}"
        python = resolve_name(kind.find_python)(given, reason)
        if given is None:
            draft.derive(kind.python_flag, python, f"where {kind.label} is installed")


def reproducible_engine(draft: Draft) -> None:
    """What is computed together decides the last bits of log-probs, and
    what arrives together is a matter of timing.
    """
    flag = ENGINES[draft.rollout_engine].single_request_flag
    if not draft.deterministic_mode or flag is None:
        return
    if not draft.was_given(flag):
        draft.derive(flag, 1, "--deterministic-mode")
    elif getattr(draft, flag) != 1:
        raise ValueError(
            f"--{flag.replace('_', '-')} is {getattr(draft, flag)} with --deterministic-mode: log-probs of "
            "requests that are computed together depend on which they are, and that on timing; leave it "
            "out, or do without --deterministic-mode."
        )


def devices(draft: Draft) -> None:
    derive_sizes(draft, visible_gpus)
    derive_offload(draft)
    derive_precision(draft, visible_gpus)
    tell_of_this_machine(draft, visible_gpus)


def run_folder(draft: Draft) -> None:
    if draft.run_dir is None:
        model = Path(draft.hf_checkpoint).name if draft.hf_checkpoint else "run"
        base = f"runs/{model or 'run'}-{draft.seed}"
        folder = choose_run_folder(base, resumption_of(draft.load, draft.ckpt_step, draft.finetune))
        draft.derive(
            "run_dir", folder, "runs/<model>-<seed>" if folder == base else f"{base} is that of another run"
        )


RULES: tuple[Rule, ...] = (
    debug_modes,
    needed_flags,
    sampling,
    context_length,
    over_sampling,
    length_of_run,
    loss,
    policy_loss,
    loss_reduction,
    group_normalisation,
    reference_model,
    distillation,
    preference_pairs,
    kept_models,
    correct_stale_tokens,
    off_policy,
    derive_batch,
    micro_batches,
    learning_rate,
    reward_shaping,
    rewards,
    evaluation,
    checkpoints,
    topology_source,  # before the engine is chosen: what is asked for must make sense whatever is installed
    engine_choice,
    trained_sampling,
    reproducible_engine,
    weight_sync,
    refuse_flags_without_effect,
    fully_async_rollout,
    megatron_trainer,
    devices,
    topology,
    router,
    trainable_parameters,
    weight_copies,
    engine_precision,
    model_parallel_sizes,
    run_folder,
    check_paths_exist,
)
