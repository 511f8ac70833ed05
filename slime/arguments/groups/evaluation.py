"""Flags and rules of evaluation: which datasets, how often, and how their responses are sampled."""

from dataclasses import dataclass
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import flag, needs, option_of
from slime.arguments.groups.eval_config import build_eval_dataset_configs
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION

# -- when flags have an effect
EVALUATES = needs("eval_interval", harmless=True)


@dataclass
class EvaluationFlags:
    """Evaluation (unset values follow those of the rollout)."""

    eval_interval: int | None = flag(None, "rollouts between evaluations", ge=1)
    eval_prompt_data: list[str] | None = flag(None, "datasets: name file name file ...", metavar="NAME_FILE")
    eval_config: str | None = flag(
        None, "YAML file of datasets with their own rewards and sampling", metavar="FILE"
    )
    eval_function_path: str | None = flag(None, "function that evaluates; default: the rollout function")
    eval_num_engines: int = flag(
        0, "engines of the policy that only serve evaluation", ge=0, only_with=EVALUATES
    )
    skip_eval_before_train: bool = flag(False, "do not evaluate before training", only_with=EVALUATES)
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", ge=1)
    eval_input_key: str | None = flag(None, "column of the prompt")
    eval_label_key: str | None = flag(None, "column of the label")
    eval_tool_key: str | None = flag(None, "column of the tools")
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", ge=0)
    eval_top_p: float | None = flag(None, "nucleus sampling", gt=0, le=1)
    eval_top_k: int | None = flag(None, "keep the k likeliest tokens; -1: all", ge=-1)
    eval_max_response_len: int | None = flag(None, "longest response", ge=1)
    eval_min_new_tokens: int | None = flag(None, "shortest response", ge=0)
    eval_max_prompt_len: int | None = flag(None, "drop longer prompts at load", ge=1)
    eval_max_context_len: int | None = flag(None, "longest prompt plus response", ge=2)


def evaluation(draft: Draft) -> None:
    resolve_eval_datasets(draft)
    if draft.eval_function_path is None:
        draft.derive("eval_function_path", draft.rollout_function_path, "same as rollout_function_path")
    for one in draft.eval_datasets:
        if one.temperature == 0 and (one.n_samples_per_eval_prompt or 1) > 1:
            draft.warn(
                f"evaluation dataset {one.name!r}: its {one.n_samples_per_eval_prompt} responses per prompt "
                "are greedy, hence equal; give it a temperature above 0, or one response."
            )
    own_evaluation = draft.eval_function_path != DEFAULT_ROLLOUT_FUNCTION
    if draft.eval_interval is not None and not draft.eval_datasets and not own_evaluation:
        raise ValueError(
            f"--eval-interval is {draft.eval_interval}, but there is nothing to evaluate on; add "
            "--eval-prompt-data name file or --eval-config."
        )


def resolve_eval_datasets(draft: Draft) -> None:
    if draft.eval_config is not None:
        entries, defaults = _read_eval_config(draft)
        because = "eval_config"
        if draft.was_given("eval_prompt_data"):
            draft.idle.append("--eval-prompt-data is set, but --eval-config names the evaluation datasets.")
    else:
        entries, defaults = _pair_names_and_files(draft.eval_prompt_data or []), {}
        because = "eval_prompt_data"
    try:
        datasets = build_eval_dataset_configs(draft, entries, defaults)
    except ValueError as error:
        raise ValueError(f"{option_of(because)}: {error}") from None
    draft.derive("eval_datasets", datasets, because)
    flat = [word for dataset in datasets for word in (dataset.name, dataset.path)]
    draft.derive("eval_prompt_data", flat or None, because)


def _read_eval_config(draft: Draft) -> tuple[Any, dict[str, Any]]:
    """Read datasets and defaults of the file; an --eval-function-path may call services (`delegate`)."""
    path = draft.eval_config
    content = read_yaml_mapping(path, "--eval-config")
    content = content.get("eval", content)
    datasets, defaults = content.get("datasets"), content.get("defaults") or {}
    if "delegate" in content:
        if draft.eval_function_path or draft.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION:
            return datasets or [], defaults
        draft.idle.append(f"delegate in {path} is set, but no --eval-function-path calls these services.")
    unknown = sorted(set(content) - {"defaults", "datasets", "delegate"})
    if unknown:
        known = "a file has `defaults` and `datasets`"
        raise ValueError(f"--eval-config {path}: unknown key {unknown[0]!r}; {known}.")
    if not datasets:
        raise ValueError(f"--eval-config {path}: no `datasets`; list at least one with a name and a path.")
    return datasets, defaults


def _pair_names_and_files(words: list[str]) -> list[dict[str, str]]:
    if len(words) == 1:
        words = ["aime", words[0]]  # slime recipes have always used this name for a single file
    if len(words) % 2:
        raise ValueError(f"--eval-prompt-data has {len(words)} values: write pairs, name file name file ...")
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]
