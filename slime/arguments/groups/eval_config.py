"""Evaluation datasets, each with a name, a file and settings; missing settings follow the flags."""

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from slime.arguments.groups.data import check_pattern, check_template

# Flags with a field's value if dataset and file do not set it; the first flag that is set wins.
FALLBACK_FLAGS: dict[str, tuple[str, ...]] = {
    **{name: (f"eval_{name}", name) for name in ("input_key", "label_key", "tool_key")},
    **{name: (f"eval_{name}", f"rollout_{name}") for name in ("temperature", "top_p", "top_k")},
    **{name: (f"rollout_{name}",) for name in ("stop", "stop_token_ids", "skip_special_tokens")},
    "metadata_key": ("metadata_key",),
    "metadata_columns": ("metadata_columns",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
}


def _specs(*names: str) -> dict[str, dict[str, tuple[str, ...]]]:
    return {
        name: {"dataset_keys": (name,), "default_keys": (name,), "arg_attrs": FALLBACK_FLAGS[name]}
        for name in names
    }


# This table in the form that users' evaluation functions read.
DATASET_RUNTIME_SPECS = _specs(
    *("n_samples_per_eval_prompt", "temperature", "top_p", "top_k", "max_response_len", "min_new_tokens"),
    *("stop", "stop_token_ids"),
)
DATASET_SAMPLE_SPECS = _specs(
    *("input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys"),
    *("apply_chat_template", "apply_chat_template_kwargs"),
)

# Keys of existing files that nothing reads: refused, because a setting without effect misleads.
UNBUILT_KEYS = (
    *("app_service", "min_eval_samples", "eval_early_stop_remaining", "eval_early_stop_idle_timeout"),
    *("message_processor", "reward_model", "remote_environment"),
)


@dataclass
class EvalDatasetConfig:
    """One evaluation dataset, fully resolved. `None`: the run's flag or the engine's default applies."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    prompt_template: str | None = None
    label_pattern: str | None = None
    metadata_columns: list[str] | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    eval_task_timeout: float | None = None  # seconds for a prompt, including the wait for its turn
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"evaluation dataset {self.name!r}"
        for name, valid, instead in (
            ("n_samples_per_eval_prompt", lambda n: n >= 1, "use at least 1"),
            ("temperature", lambda n: n >= 0, "use 0 (greedy) or more"),
            ("top_p", lambda n: 0 < n <= 1, "use a value in (0, 1]"),
            ("eval_task_timeout", lambda n: n > 0, "use seconds above 0"),
            ("metadata_overrides", lambda value: isinstance(value, dict), "it must be a mapping"),
        ):
            value = getattr(self, name)
            if value is not None and not valid(value):
                raise ValueError(f"{where}: {name} is {value!r}; {instead}.")
        if self.prompt_template is not None:
            check_template(f"{where}: prompt_template", self.prompt_template)
        if self.label_pattern is not None:
            check_pattern(f"{where}: label_pattern", self.label_pattern)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Return everything that decides what the loaded dataset contains."""
        kwargs = tuple(sorted((self.apply_chat_template_kwargs or {}).items(), key=str))
        media = tuple(sorted((self.multimodal_keys or {}).items()))
        columns = (self.input_key, self.label_key, self.tool_key, self.metadata_key)
        columns += (self.prompt_template, self.label_pattern, *(self.metadata_columns or ()))
        return (self.name, self.path, *columns, media, self.apply_chat_template, repr(kwargs))

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Return a sample's metadata with this dataset's reward type and overrides added."""
        metadata = dict(sample_metadata or {})
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        return metadata | self.metadata_overrides


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Return `datasets:` as a list of entries, from a list of mappings or a mapping of name to settings."""
    entries = config or []
    if isinstance(entries, dict):
        entries = [
            {"name": name} | entry if isinstance(entry, dict) else entry or {"name": name}
            for name, entry in entries.items()
        ]
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"datasets must be a list or a mapping, not {type(config).__name__}.")
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"an evaluation dataset must be a mapping with name and path, not {entry!r}.")
    return [dict(entry) for entry in entries]


def build_eval_dataset_configs(
    args: object, raw_config: Any, defaults: dict[str, Any]
) -> list[EvalDatasetConfig]:
    """Resolve every dataset: its own entry, else the defaults of the file, else the flags."""
    _refuse_unknown_keys(defaults, "eval defaults", not_here=("name", "path"))
    configs = [_build_one(args, entry, defaults) for entry in ensure_dataset_list(raw_config)]
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two evaluation datasets are called {name!r}; give each its own name.")
    return configs


def _build_one(args: object, entry: dict[str, Any], defaults: dict[str, Any]) -> EvalDatasetConfig:
    where = f"evaluation dataset {entry.get('name', '(no name)')!r}"
    for required in ("name", "path"):
        if not entry.get(required):
            raise ValueError(f"{where} has no {required}: every dataset needs a name and a path.")
    _refuse_unknown_keys(entry, where)
    values = dict(defaults) | entry
    # The run's treatment of a column also applies to evaluation columns of that name.
    for name, key, flag in (
        ("prompt_template", "input_key", "eval_input_key"),
        ("label_pattern", "label_key", "eval_label_key"),
    ):
        if values.get(name) is None and values.get(key) is None and getattr(args, flag, None) is None:
            values[name] = getattr(args, name, None)  # plug-ins pass namespaces of their own
    for name, flags in FALLBACK_FLAGS.items():
        if values.get(name) is None:
            values[name] = pick_from_args(args, flags)
    return EvalDatasetConfig(
        **{k: v for k, v in values.items() if v is not None or k != "metadata_overrides"}
    )


def pick_from_args(args: object, attrs: Sequence[str]) -> Any:
    """Return the first of these flags that is set; None: none is."""
    found = (getattr(args, attr, None) for attr in attrs)
    return next((value for value in found if value is not None), None)


def _apply_dataset_field_overrides(
    args: object,
    dataset_cfg: MutableMapping[str, Any],
    defaults: Mapping[str, Any] | None,
    spec_names: Mapping[str, Mapping[str, Sequence[str]]],
) -> None:
    """Fill fields of a dataset entry in place: its own value, else a default, else the flag's."""
    for name, spec in spec_names.items():
        own = [dataset_cfg[key] for key in spec["dataset_keys"] if key in dataset_cfg]
        general = [defaults[key] for key in spec["default_keys"] if key in defaults] if defaults else []
        given = [*own, *general]
        dataset_cfg[name] = given[0] if given else pick_from_args(args, spec["arg_attrs"])


def _refuse_unknown_keys(entry: dict[str, Any], where: str, not_here: tuple[str, ...] = ()) -> None:
    known = [f.name for f in dataclasses.fields(EvalDatasetConfig) if f.name not in not_here]
    for key in entry:
        if key in UNBUILT_KEYS:
            raise ValueError(f"{where}: {key} is a slime setting that this version does not build yet.")
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known keys: {', '.join(known)}."
            raise ValueError(f"{where}: unknown key {key!r}.{hint}")
