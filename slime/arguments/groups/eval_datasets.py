"""`args.eval_datasets`: from --eval-config or --eval-prompt-data to a list of fully resolved datasets."""

from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.groups.eval_config import build_eval_dataset_configs


def resolve_eval_datasets(draft: Draft) -> None:
    if draft.eval_config is not None:
        entries, defaults = _read_eval_config(draft.eval_config)
        because = "eval_config"
        if draft.was_given("eval_prompt_data"):
            raise ValueError(
                "--eval-config and --eval-prompt-data both name evaluation datasets; keep one of them."
            )
    else:
        entries, defaults = _pair_names_and_files(draft.eval_prompt_data or []), {}
        because = "eval_prompt_data"
    try:
        datasets = build_eval_dataset_configs(draft, entries, defaults)
    except ValueError as error:
        raise ValueError(f"--{because.replace('_', '-')}: {error}") from None
    draft.derive("eval_datasets", datasets, because)
    flat = [word for dataset in datasets for word in (dataset.name, dataset.path)]
    draft.derive("eval_prompt_data", flat or None, because)


def _read_eval_config(path: str) -> tuple[Any, dict[str, Any]]:
    """The datasets and the defaults of a file; the top level `eval:` may be left out."""
    content = read_yaml_mapping(path, "--eval-config")
    content = content.get("eval", content)
    unknown = sorted(set(content) - {"defaults", "datasets"})
    if unknown:
        raise ValueError(
            f"--eval-config {path}: unknown key {unknown[0]!r}; a file has `defaults` and `datasets`."
        )
    if not content.get("datasets"):
        raise ValueError(f"--eval-config {path}: no `datasets`; list at least one with a name and a path.")
    return content["datasets"], content.get("defaults") or {}


def _pair_names_and_files(words: list[str]) -> list[dict[str, str]]:
    if len(words) == 1:
        words = ["aime", words[0]]  # a single file has had this name in slime recipes from the start
    if len(words) % 2:
        raise ValueError(
            f"--eval-prompt-data has {len(words)} words ({' '.join(words)}): write pairs, name file name "
            "file ..."
        )
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]
