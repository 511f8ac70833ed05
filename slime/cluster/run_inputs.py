"""Digests of the files that define a run: a run that is resumed notices which of them have changed.

    {"--hf-checkpoint config.json": "9f3c...", "--custom-rm-path": "51aa...", "--eval-prompt-data held": ...}

They stand in run.json and in the manifest of every checkpoint. The digest of the prompts is part of the state
of the data source. Weights are not read: those of a resumed run come from its checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime.arguments import Args
from slime.arguments.groups.run import without_rows
from slime.plugins import PLUGIN_POINTS
from slime.utils.files.run_file import refuse_other_run, resumption_of
from slime.utils.files.step_folders import StepFolder
from slime.utils.models.model_files import TOKENIZER_FILES

logger = logging.getLogger(__name__)

# Flags of models, whose files below must be what they were; a change of any other file is a warning.
_MODELS = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")
_MODEL_FILES = (
    *("config.json", "generation_config.json", "*.py"),
    *TOKENIZER_FILES,
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("preprocessor_config.json", "processor_config.json"),
)


def digest_inputs(args: Args) -> dict[str, str]:
    """The digest of every file that defines this run and that is readable here."""
    return {name: digest for name, path in _inputs(args) if (digest := _digest(path)) is not None}


def compare_inputs(args: Args, checkpoint: StepFolder | None, inputs: Mapping[str, str]) -> None:
    """Compare files with the ones that the run was started with, where these settings resume one.

    ValueError: the tokenizer or the configuration of a model is another. Other files are warned of.
    """
    if args.finetune:
        return
    resumption = resumption_of(args.load, args.ckpt_step, args.finetune)
    before, resumes = refuse_other_run(Path(args.run_dir), resumption)
    record = before if resumes else None
    if record is None and checkpoint is None:
        return
    known = (record.last.inputs if record is not None else None) or (
        checkpoint.manifest.inputs if checkpoint is not None else None
    )
    if known is None:
        logger.warning(
            "The resumed run has no digests of its files (an older slime started it): changes of tokenizer, "
            "model configuration, reward or evaluation data since then are not noticed."
        )
        return
    paths = dict(_inputs(args))
    refused: list[str] = []
    for name in sorted(known):
        flag, _, file = name.partition(" ")
        name_of_flag = flag.removeprefix("--").replace("-", "_")
        is_model = name_of_flag in _MODELS
        if inputs.get(name) == known[name] or (name not in paths and not is_model):
            continue  # where a flag is gone or names another dataset, the change of settings is reported
        if is_model:
            model = getattr(args, name_of_flag)
            how = "has changed" if name in inputs else "is missing"
            refused += [f"{flag} {model}: {file} {how}"] if model is not None else []
        else:
            logger.warning(
                "%s: %s has changed since this run was started; it continues with the file as it is now",
                *(name, paths[name]),
            )
    if refused:
        raise ValueError(
            f"{'; '.join(refused)} since this run was started: it would train another model from here on. "
            "Restore the file, or start a new run from the weights of the checkpoint: --finetune with "
            "another --run-dir and another --save."
        )


def _inputs(args: Args) -> Iterator[tuple[str, Path]]:
    """(Name, file) of what defines this run."""
    for flag in _MODELS:
        model = getattr(args, flag)
        for path in sorted(_model_files(model)) if model else ():
            yield f"--{flag.replace('_', '-')} {path.name}", path
    for point in PLUGIN_POINTS:
        value = getattr(args, point.flag)
        if isinstance(value, str) and (file := _plugin_file(value)) is not None:
            yield point.option, file
    if args.judge_rubric is not None:
        yield "--judge-rubric", Path(args.judge_rubric)
    for dataset in args.eval_datasets:
        yield f"--eval-prompt-data {dataset.name}", Path(without_rows(dataset.path)).expanduser()


def _model_files(model: str) -> set[Path]:
    folder = Path(model).expanduser()
    if not folder.is_dir():  # a model of the hub: what is in its cache
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return set()
        if not isinstance(found, str):
            return set()
        folder = Path(found).parent
    return {path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()}


def _plugin_file(path: str) -> Path | None:
    """The file of a function of the user's; None: it is slime's own, or has no file."""
    module = path.rpartition(":")[0] or path.rpartition(".")[0]
    if module.endswith(".py"):
        return Path(module).expanduser()
    if module.partition(".")[0] == "slime":
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _digest(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:  # not a file of this machine
        return None
