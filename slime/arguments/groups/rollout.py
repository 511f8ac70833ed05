"""Flags and rules of generation: the model, how tokens are sampled, and which functions take part."""

from dataclasses import dataclass

from slime.arguments.core.draft import ASYNCHRONOUS, DEFAULT, Draft
from slime.arguments.core.flag import flag, needs, option_of
from slime.arguments.groups.data import SHARED_DATASET
from slime.arguments.groups.objectives import SUPERVISED_LOSSES

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC_ROLLOUT_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
REFUSED = {
    "colocate": "engines that release the device for training cannot keep generating",
    "partial_rollout": "no response is interrupted there, so none can be continued",
}


# -- when flags have an effect
IN_FLIGHT = needs(
    "rollout_function_path",
    FULLY_ASYNC_ROLLOUT_FUNCTION,
    or_if=lambda draft: draft.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION,
)
PARTIAL = needs("partial_rollout")


@dataclass
class RolloutFlags:
    """Rollout."""

    hf_checkpoint: str | None = flag(
        None, "Hugging Face folder or hub id of model and tokenizer", metavar="MODEL"
    )
    allow_unverified_model: bool = flag(
        False, "train a model family that was never compared with transformers (docs/model_families.md)"
    )
    rollout_function_path: str = flag(DEFAULT_ROLLOUT_FUNCTION, "function that makes one rollout")
    rollout_temperature: float = flag(1.0, "sampling temperature, above 0")
    rollout_top_p: float = flag(1.0, "nucleus sampling; the trainer computes over it too", gt=0, le=1)
    rollout_top_k: int = flag(-1, "keep the k likeliest tokens, in the trainer too; -1: all", ge=-1)
    allow_sampling_mismatch: bool = flag(
        False, "train on top-p or top-k samples with log-probs of the whole vocabulary"
    )
    rollout_max_response_len: int | None = flag(None, "longest response in tokens", ge=1)
    rollout_max_prompt_len: int | None = flag(
        None, "drop longer prompts at load", ge=1, only_with=SHARED_DATASET
    )
    rollout_max_context_len: int | None = flag(None, "longest prompt plus response", ge=2)
    rollout_stop: list[str] | None = flag(None, "stop strings", metavar="TEXT")
    rollout_stop_token_ids: list[int] | None = flag(None, "stop token ids", ge=0, metavar="ID")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")
    over_sampling_batch_size: int | None = flag(
        None, "prompts fetched at a time; default: all of a rollout", ge=1
    )
    rollout_workers: int = flag(
        1, "processes that run generate functions, rewards and parsing; 1: the driver does", ge=1
    )
    partial_rollout: bool = flag(False, "keep unfinished responses and continue them in the next rollout")
    mask_offpolicy_in_partial_rollout: bool = flag(False, "do not train on older tokens", only_with=PARTIAL)
    dynamic_sampling_filter_path: str | None = flag(None, "function that keeps or drops a group")
    custom_generate_function_path: str | None = flag(None, "function that generates one sample")
    rollout_sample_hook_path: list[str] = flag(
        [], "function called on each generated sample before its reward (repeatable)", repeatable=True
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function that marks samples of the batch to be left out of the loss"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function that sees every finished group, dropped ones included"
    )
    max_weight_staleness: int = flag(
        1,
        "largest age of a trained token, in weight pushes (fully asynchronous; 2 with train_async.py)",
        ge=0,
        only_with=IN_FLIGHT,
    )
    group_failure_action: str = flag(
        "stop",
        "what to do if a sample cannot be generated: stop, or drop or retry its group",
        choices=("stop", "drop", "retry"),
    )
    buffer_filter_path: str | None = flag(None, "function that takes groups out of the buffer")
    custom_rollout_log_function_path: str | None = flag(None, "function that logs a rollout")
    custom_eval_rollout_log_function_path: str | None = flag(None, "function that logs an evaluation")


def sampling(draft: Draft) -> None:
    temperature = draft.rollout_temperature
    if not temperature > 0:
        raise ValueError(
            f"--rollout-temperature is {temperature:g}: greedy decoding is not a policy RL can improve."
        )
    if draft.loss_type in SUPERVISED_LOSSES and temperature != 1:
        raise ValueError(
            f"--rollout-temperature is {temperature:g} with --loss-type {draft.loss_type}: a supervised loss "
            "is that of the model as it is; use 1 (evaluation has --eval-temperature)."
        )
    if draft.rollout_top_k == 0:
        raise ValueError("--rollout-top-k is 0, which keeps no token; use -1 for all tokens.")


def context_length(draft: Draft) -> None:
    limit, prompt = draft.rollout_max_context_len, draft.rollout_max_prompt_len
    if limit is None:
        return
    if prompt is None:
        draft.derive("rollout_max_prompt_len", limit - 1, "rollout_max_context_len - 1, room for one token")
    elif prompt > limit - 1:
        raise ValueError(
            f"--rollout-max-prompt-len is {prompt}, but --rollout-max-context-len is {limit}: use at most "
            f"{limit - 1}."
        )
    if draft.eval_max_context_len is None:
        draft.derive("eval_max_context_len", limit, "same as rollout_max_context_len")


def over_sampling(draft: Draft) -> None:
    size, wanted = draft.over_sampling_batch_size, draft.rollout_batch_size
    if size is None:
        draft.derive("over_sampling_batch_size", wanted, "same as rollout_batch_size")
    elif size < wanted:
        raise ValueError(
            f"--over-sampling-batch-size is {size}, less than --rollout-batch-size {wanted}: one fetch could "
            "not fill a rollout."
        )


def fully_async_rollout(draft: Draft) -> None:
    if draft.rollout_function_path != FULLY_ASYNC_ROLLOUT_FUNCTION:
        return
    for name, reason in REFUSED.items():
        if getattr(draft, name):
            raise ValueError(f"{option_of(name)} with the fully asynchronous rollout function: {reason}.")
    if draft.rollout_max_response_len is None:
        raise ValueError("--rollout-max-response-len is required: give the longest response in tokens.")
    staleness_bound(draft)


def staleness_bound(draft: Draft) -> None:
    """Derive --max-weight-staleness: the asynchronous loop's batches are at least one push old."""
    if draft.training_loop != ASYNCHRONOUS or draft.rollout_function_path != FULLY_ASYNC_ROLLOUT_FUNCTION:
        return
    if draft.sources["max_weight_staleness"] == DEFAULT:
        why = "one push of the asynchronous loop itself, one for groups in flight"
        draft.derive("max_weight_staleness", 2, why)
    elif draft.max_weight_staleness < 1:
        raise ValueError(
            "--max-weight-staleness is 0, but the asynchronous loop trains each batch one push after its "
            "engines had not seen; use at least 1, or train.py."
        )
