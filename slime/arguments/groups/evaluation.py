"""Flags about evaluation: which datasets, how often, and how their responses are sampled."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class EvaluationFlags:
    """Evaluation (unset values follow those of the rollout)."""

    eval_interval: int | None = flag(None, "rollouts between evaluations", ge=1)
    eval_prompt_data: list[str] | None = flag(
        None, "datasets as: name file name file ...", metavar="NAME_FILE"
    )
    eval_config: str | None = flag(
        None, "YAML of datasets, each with its own reward and sampling", metavar="FILE"
    )
    eval_function_path: str | None = flag(
        None, "function that evaluates; default: the rollout function", metavar="PATH"
    )
    eval_num_engines: int = flag(
        0,
        "so many of the policy's engines, the last ones, serve evaluation alone; they get every push; 0: "
        "evaluation asks the engines of the rollout",
        ge=0,
    )
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first rollout")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", ge=1)
    eval_input_key: str | None = flag(None, "column of the prompt", metavar="KEY")
    eval_label_key: str | None = flag(None, "column of the label", metavar="KEY")
    eval_tool_key: str | None = flag(None, "column of the tools", metavar="KEY")
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", ge=0)
    eval_top_p: float | None = flag(None, "nucleus sampling", gt=0, le=1)
    eval_top_k: int | None = flag(None, "keep the k likeliest tokens; -1: all", ge=-1)
    eval_max_response_len: int | None = flag(None, "longest response", ge=1)
    eval_min_new_tokens: int | None = flag(None, "shortest response", ge=0)
    eval_max_prompt_len: int | None = flag(None, "drop longer prompts at load", ge=1)
    eval_max_context_len: int | None = flag(None, "longest prompt plus response", ge=2)
