"""Opens the folder of a run and records there what it is, from its start to its end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from slime.arguments import Args
from slime.arguments.core.draft import is_given
from slime.arguments.groups.run import base_folder
from slime.cluster.run_inputs import compare_inputs, digest_inputs
from slime.record.schema import RECORD_FILE, RecordError, refuse_foreign
from slime.utils.errors import FolderTaken
from slime.utils.files.run_file import (
    changed_settings,
    claim_run_folder,
    close_run_file,
    has_finished,
    is_used,
    open_run_file,
    other_settings,
    resumption_of,
    run_of_folder,
)
from slime.utils.files.step_folders import StepFolder, find_step, step_folders
from slime.utils.machine import shm
from slime.utils.machine.run_identity import Run

logger = logging.getLogger(__name__)


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
        told = [f"{name} {before!r} -> {now!r}" for name, (before, now) in changed.items()]
        logger.warning("This run resumes with changed settings: %s", "; ".join(told))
    if record.earlier and args.record_max_mib and is_used(run_dir) and not (run_dir / RECORD_FILE).exists():
        logger.warning(
            "%s is missing: earlier samples are not in the record, and what was generated since the "
            "checkpoint is generated again.",
            run_dir / RECORD_FILE,
        )
    return Run(record.id, run_dir, shm.make_prefix(), record.num_starts, inputs=inputs)


@contextlib.contextmanager
def claimed(args: Args) -> Iterator[Args]:
    """Yield the settings with a run folder that no other run chooses; a given one stays as it is."""
    if is_given(args.sources["run_dir"]):
        yield args
        return
    base = base_folder(args.hf_checkpoint, args.seed)
    with claim_run_folder(base, resumption_of(args.load, args.ckpt_step, args.finetune)) as folder:
        run_dir = str(Path(folder).absolute())
        yield args if run_dir == args.run_dir else args.replace(run_dir=run_dir)


def refuse_taken(args: Args) -> None:
    """Raise FolderTaken where the run folder, or the record in it, is another run's; writes nothing."""
    folder = Path(args.run_dir)
    try:
        run_id = run_of_folder(folder, resumption_of(args.load, args.ckpt_step, args.finetune))
    except FolderTaken as error:
        raise FolderTaken(f"{error}{_why_not_resumed(folder, args)}") from None
    if args.record_max_mib:
        try:
            refuse_foreign(folder / RECORD_FILE, run_id or "")
        except RecordError as error:
            raise FolderTaken(str(error)) from None


def _why_not_resumed(folder: Path, args: Args) -> str:
    """What keeps the run of a folder, which saves where this one does, from resuming by itself."""
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
            "train anew, give another --run-dir and another --save; to go on, --load with the folder of "
            "--save and a larger --num-rollout."
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
                f"{args.load} has {done} steps already. Give a larger --num-rollout to go on."
            )
    return None


def close_run(run: Run, error: BaseException | None, stopped: str | None = None) -> None:
    """Record end and cause. `stopped`: it was asked to end before its last step."""
    try:
        close_run_file(run.run_dir, error, stopped)
    except OSError as failure:  # what ended the run matters more
        logger.warning("%s: the end of the run was not recorded: %s", run.run_dir, failure)
