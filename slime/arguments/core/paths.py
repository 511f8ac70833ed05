"""Files and folders that flags name: missing ones are reported before anything starts."""

import re
from pathlib import Path

from slime.arguments.core.draft import Draft
from slime.catalog.datasets import why_unreadable

ROW_RANGE = re.compile(r"^(.*)@\[-?\d*:-?\d*\]$")
# What a model hub calls a model: `name` or `owner/name`. Anything else is meant as a path.
HUB_ID = re.compile(r"^[\w-][\w.-]*(/[\w.-]+)?$")


def check_paths_exist(draft: Draft) -> None:
    if draft.prompt_data is not None and not draft.load_debug_rollout_data:
        words = [draft.prompt_data] if isinstance(draft.prompt_data, str) else draft.prompt_data
        for path in (path for word in words for path in _split_files(word)):
            _check_data_file("--prompt-data", path)
    for dataset in draft.eval_datasets:
        _check_data_file(f"evaluation dataset {dataset.name!r}", dataset.path)
    _check_model("--hf-checkpoint", draft.hf_checkpoint)
    for flag, path in (
        ("--ref-load", draft.ref_load),
        ("--critic-load", draft.critic_load),
        ("--opd-teacher-load", draft.opd_teacher_load),
    ):
        _check_model(flag, path)
    # A run that resumes itself names the same folder twice, and its first start finds nothing there.
    if draft.load is not None and draft.load != draft.save and not Path(draft.load).expanduser().is_dir():
        raise ValueError(
            f"--load is {draft.load}: there is no such folder. (A folder that may not exist yet is allowed "
            "only where --save names the same one.)"
        )


def _split_files(word: str) -> list[str]:
    """Several files may be written as one word with commas; a comma in
    the name of an existing file is just that.
    """
    return (
        [word] if _without_rows(word).exists() else [part.strip() for part in word.split(",") if part.strip()]
    )


def _without_rows(path: str) -> Path:
    match = ROW_RANGE.match(path)
    return Path(match.group(1) if match else path).expanduser()


def _check_data_file(what: str, path: str) -> None:
    reason = why_unreadable(_without_rows(path))
    if reason is not None:
        raise ValueError(f"{what} is {path}: {reason}.")


def _check_model(flag: str, model: str | None) -> None:
    if model is None:
        return
    path = Path(model).expanduser()
    if path.exists():
        if path.is_dir() and not any(path.iterdir()):
            raise ValueError(
                f"{flag} is {model}: the folder is empty; it should hold config.json and weights."
            )
        return
    if not HUB_ID.match(model):
        raise ValueError(f"{flag} is {model}: there is no such folder (and a hub id looks like owner/name).")
