"""Flags about generation: the model, how tokens are sampled, and which functions take part."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC_ROLLOUT_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@dataclass
class RolloutFlags:
    """Rollout."""

    hf_checkpoint: str | None = flag(
        None, "Hugging Face folder or hub id of the model and tokenizer", metavar="MODEL"
    )
    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION, "function that makes one rollout", metavar="PATH"
    )
    rollout_temperature: float = flag(1.0, "sampling temperature")
    rollout_top_p: float = flag(
        1.0,
        "nucleus sampling; below 1 the trainer computes over the recorded nucleus (embedded engine)",
        gt=0,
        le=1,
    )
    rollout_top_k: int = flag(
        -1,
        "keep the k likeliest tokens; -1: all. The trainer computes over those kept (embedded engine)",
        ge=-1,
    )
    allow_sampling_mismatch: bool = flag(
        False,
        "train on top-p / top-k samples with log-probs of the whole vocabulary, which are not those they "
        "were drawn with",
    )
    rollout_max_response_len: int | None = flag(None, "longest response in tokens", ge=1)
    rollout_max_prompt_len: int | None = flag(None, "drop prompts longer than this at load", ge=1)
    rollout_max_context_len: int | None = flag(None, "longest prompt plus response", ge=2)
    rollout_stop: list[str] | None = flag(None, "stop strings", metavar="TEXT")
    rollout_stop_token_ids: list[int] | None = flag(None, "stop token ids", ge=0, metavar="ID")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")
    over_sampling_batch_size: int | None = flag(
        None, "prompts fetched at a time; default: --rollout-batch-size", ge=1
    )
    partial_rollout: bool = flag(False, "keep unfinished responses and continue them in the next rollout")
    mask_offpolicy_in_partial_rollout: bool = flag(False, "do not train on tokens of earlier policies")
    dynamic_sampling_filter_path: str | None = flag(
        None, "function that keeps or drops a group", metavar="PATH"
    )
    custom_generate_function_path: str | None = flag(
        None, "function that generates one sample", metavar="PATH"
    )
    rollout_sample_hook_path: list[str] = flag(
        [],
        "function called on each generated sample before its reward (repeatable)",
        metavar="PATH",
        repeatable=True,
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function that marks samples of the batch to be left out of the loss", metavar="PATH"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function that sees every finished group, dropped ones included", metavar="PATH"
    )
    max_weight_staleness: int = flag(
        1,
        "fully asynchronous rollout: how many weight pushes behind the engines a group's oldest token may be",
        ge=0,
    )
    adaptive_concurrency: bool = flag(
        False,
        "fit the requests in flight to the load the engines report, up to --sglang-server-concurrency each",
    )
    group_failure_action: str = flag(
        "stop",
        "when a sample cannot be generated: stop the run, drop its group, keep the others of it, or retry "
        "the group",
        choices=("stop", "drop", "keep", "retry"),
    )
    group_max_attempts: int = flag(
        3,
        "how often one group is generated: after failures, or when it became older than "
        "--max-weight-staleness",
        ge=1,
    )
    buffer_filter_path: str | None = flag(
        None, "function that takes groups out of the buffer", metavar="PATH"
    )
    custom_rollout_log_function_path: str | None = flag(None, "function that logs a rollout", metavar="PATH")
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "function that logs an evaluation", metavar="PATH"
    )
