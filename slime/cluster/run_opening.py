"""Opens the folder of a run, and records in run.json its settings, its inputs and how it ended.

Digests of the files that define a run are in run.json and in the manifest of every checkpoint, so that a
resumed run can detect which of them have changed:

    {"--hf-checkpoint config.json": "9f3c...", "--custom-rm-path": "51aa...", "--eval-prompt-data held": ...}

The digest of the prompts is part of the state of the data source. Weights are not read: those of a resumed
run come from its checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime.arguments import Args
from slime.arguments.core.draft import is_given
from slime.arguments.groups.run import base_folder, without_rows
from slime.plugins import PLUGIN_POINTS
from slime.record import RecordError, record_file
from slime.record.schema import refuse_foreign
from slime.utils.errors import FolderInUse
from slime.utils.files.run_file import (
    changed_settings,
    claim_run_folder,
    close_run_file,
    has_finished,
    open_run_file,
    other_settings,
    refuse_other_run,
    resumption_of,
    run_of_folder,
)
from slime.utils.files.step_folders import StepFolder, find_step, step_folders
from slime.utils.machine import shm
from slime.utils.machine.run_identity import Run
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


def open_run(args: Args, checkpoint: StepFolder | None = None) -> Run:
    """Claim the folder for the run, record its settings, and free shared memory of dead runs."""
    shm.unlink_stale()
    run_dir = Path(args.run_dir).absolute()  # processes elsewhere have folders of their own to start from
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        name: {"value": value, "source": args.sources.get(name)}
        for name, value in args.to_dict(hide_secrets=True).items()
    }
    resumed = None
    if checkpoint is not None:
        manifest = checkpoint.manifest
        resumed = {"checkpoint": str(checkpoint.path), "run": manifest.run_id, "rollout": manifest.rollout_id}
    inputs = digest_inputs(args)
    compare_inputs(args, checkpoint, inputs)
    record = open_run_file(
        run_dir,
        settings,
        str(Path(args.save).absolute()) if args.save is not None else None,
        resumption_of(args.load, args.ckpt_step, args.finetune),
        resumed,
        inputs,
    )
    if changed := changed_settings(record):
        changes = [f"{name} {before!r} -> {now!r}" for name, (before, now) in changed.items()]
        logger.warning("This run resumes with changed settings: %s", "; ".join(changes))
    return Run(record.id, run_dir, shm.make_prefix(), record.num_starts, inputs=inputs)


@contextlib.contextmanager
def claimed(args: Args) -> Iterator[Args]:
    """Yield the settings with a run folder that no other run uses; a folder that the user chose is kept."""
    if is_given(args.sources["run_dir"]):
        yield args
        return
    base = base_folder(args.hf_checkpoint, args.seed)
    with claim_run_folder(base, resumption_of(args.load, args.ckpt_step, args.finetune)) as folder:
        run_dir = str(Path(folder).absolute())
        yield args if run_dir == args.run_dir else args.replace(run_dir=run_dir)


def refuse_taken(args: Args) -> None:
    """Raise FolderInUse where the run folder, or the record in it, is another run's; writes nothing."""
    folder = Path(args.run_dir)
    try:
        run_id = run_of_folder(folder, resumption_of(args.load, args.ckpt_step, args.finetune))
    except FolderInUse as error:
        raise FolderInUse(f"{error}{_why_not_resumed(folder, args)}") from None
    if args.record_max_mib:
        try:
            refuse_foreign(record_file(folder), run_id or "")
        except RecordError as error:
            raise FolderInUse(str(error)) from None


def _why_not_resumed(folder: Path, args: Args) -> str:
    """Return why the run in a folder, which has the same --save, is not resumed automatically."""
    if not args.auto_resume or args.load is not None or args.save is None or args.finetune:
        return ""
    changed = other_settings(folder, args.to_dict(hide_secrets=True), args.save)
    named = [f"--{name.replace('_', '-')} {now} (was {was})" for name, (was, now) in changed.items()]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    why = f" It is not resumed by itself because its settings differ: {', '.join(named[:5])}{more}."
    return why if named else ""


def nothing_left(args: Args) -> str | None:
    """Return why a run has no step left; None: it has, or must be started to know.

    A driver may be killed after its last step: a script that restarts it until it succeeds must end.
    """
    may_resume = args.auto_resume and args.load is None and not args.finetune
    settings = args.to_dict(hide_secrets=True)
    if may_resume and args.save is not None and has_finished(Path(args.run_dir), settings, args.save):
        return (
            f"nothing is left to do: --run-dir {args.run_dir} holds this very run, and it has finished. To "
            f"train anew, give other folders; to continue, --load {args.save} with a larger --num-rollout."
        )
    steps = step_folders(args.load) if args.load is not None and not args.finetune else {}
    if not steps or not args.num_rollout or max(steps) < args.num_rollout:
        return None
    with contextlib.suppress(ValueError):  # reported where it is loaded
        found = find_step(args.load or "", args.ckpt_step)
        done = found.manifest.rollout_id + 1 if found is not None else 0
        if done > args.num_rollout:
            return (
                f"nothing is left to do: --num-rollout is {args.num_rollout}, and the checkpoint in --load "
                f"{args.load} has {done} steps already. Give a larger --num-rollout to continue."
            )
    return None


def close_run(run: Run, error: BaseException | None, stopped: str | None = None) -> None:
    """Record end and cause. `stopped`: it was asked to end before its last step."""
    try:
        close_run_file(run.run_dir, error, stopped)
    except OSError as failure:  # what ended the run matters more
        logger.warning("%s: the end of the run was not recorded: %s", run.run_dir, failure)


def digest_inputs(args: Args) -> dict[str, str]:
    """Return the digest of every file that defines this run and that is readable here."""
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
    """Yield (name, file) of everything that defines this run."""
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
    """Return the file of a user's function; None: it is slime's own, or has no file."""
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
