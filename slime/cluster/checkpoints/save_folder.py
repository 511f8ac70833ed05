"""Checks the folder of `--save` before the start, reserves it for one run, and reports when it fills up."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slime.arguments import Args
from slime.catalog.optimizers import OPTIMIZERS
from slime.cluster.checkpoints.checkpoint import resolve_load
from slime.cluster.run_opening import compare_inputs, digest_inputs, refuse_taken
from slime.preflight.findings import Finding, error_of
from slime.utils.errors import FolderInUse, RunStopped
from slime.utils.files.folder_lock import FolderLock, refuse_locked
from slime.utils.files.run_file import resumption_of, run_of_folder
from slime.utils.files.step_folders import same_folder, step_folders
from slime.utils.machine import shm

_PROBE_BYTES = 1 << 20
_LOOKED_AT = 1000  # places of models to come
_FULL_BYTES = 1 << 20  # less than this is full: what failed to be written may have left that much
_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_DISK_ERRORS = (*_NO_ROOM, errno.EIO, errno.EACCES, errno.EPERM)
_IN_WORKER = re.compile(r"^in \S+ on (.+):$", re.MULTILINE)  # the note of a handle of another process


def open_save_folder(args: Args) -> FolderLock:
    """Prepare the folder of --save and lock it for this run. ValueError: it cannot be used."""
    assert args.save is not None, "asked for without --save"
    folder = Path(args.save)
    prepare_folder("--save", folder, _least_bytes(args))
    lock = FolderLock(folder, "--save")
    try:
        _refuse_others(args)
    except BaseException:
        lock.release()
        raise
    return lock


def open_model_folder(args: Args) -> None:
    """Check that models can be written where --save-hf says. ValueError: why not."""
    assert args.save_hf is not None, "asked for without --save-hf"
    prepare_folder("--save-hf", _fixed_part(args.save_hf))
    _refuse_other_models(args)


def prepare_folder(flag: str, folder: Path, needed_bytes: int = 0) -> None:
    """Make the folder if need be and write to it, as the run will."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(probe.unlink, missing_ok=True)
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        why = _why(error)
        fix = "free room there, or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
        raise ValueError(f"{flag} {folder} cannot be written: {why}; {fix} another folder.") from None
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ValueError(
            f"{flag} {folder} has {free >> 20} MiB free, and a checkpoint of this model takes at least "
            f"{needed_bytes >> 20} MiB: free room there, or give another folder."
        )


@contextlib.contextmanager
def naming_disk_errors(flag: str, folder: Path, rollout_id: int) -> Iterator[None]:
    """Turn disk errors while a checkpoint is written into one message, whichever process or library wrote."""
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        cause = disk_error(error, folder)
        if cause is None:
            raise
        last = max(step_folders(folder), default=None)
        kept = f"; the last complete one is that of rollout {last}" if last is not None else ""
        raise RunStopped(
            f"{flag} {folder}: the checkpoint of rollout {rollout_id} was not written: {cause}{kept}"
        ) from error


@contextlib.contextmanager
def naming_full_disks(args: Args) -> Iterator[None]:
    """Turn an error for lack of disk space into one message instead of a traceback."""
    try:
        yield
    except (RunStopped, ValueError):
        raise
    except Exception as error:
        found = _find_os_error(error, _NO_ROOM)
        if found is not None:
            where, why = str(found.filename or "a file of this run"), _why(found)
        else:  # torch does not report why a file was not written
            full = (f"{flag} {path}" for flag, path in _written_folders(args).items() if _is_full(path))
            where, why = next(full, ""), _why(_FULL)
        if not where:
            raise
        fix = "make room"
        if where.endswith(str(shm.FOLDER)):
            where, fix = f"the shared memory {shm.FOLDER}", "enlarge it (docker: --shm-size)"
            why = f"it is full ({(found or _FULL).strerror})"
        raise RunStopped(
            f"{where}: {why}; {fix}, and start this command again: it resumes from what is on the disk."
        ) from error


def _written_folders(args: Args) -> dict[str, Path]:
    flags = ("run_dir", "save", "save_debug_rollout_data", "save_debug_train_data", "update_weight_disk_dir")
    given = {f"--{name.replace('_', '-')}": getattr(args, name) for name in flags}
    folders = {
        flag: _fixed_part(value) if "{" in value else Path(value) for flag, value in given.items() if value
    }
    return {**folders, "shared memory": shm.FOLDER}


def disk_error(error: BaseException, folder: Path) -> str | None:
    """Describe what the disk did, if it caused the error; None: it is not known to be the cause."""
    found = _find_os_error(error, _DISK_ERRORS)
    if found is None and _is_full(folder):
        found = _FULL
    host = _host_of(error)
    return None if found is None else _why(found) + (f" on {host}" if host is not None else "")


def _host_of(error: BaseException) -> str | None:
    """Return the host of the process that raised an error, as the handle of that process has noted it."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    found = _IN_WORKER.search(notes)
    return found[1] if found is not None else None


def _find_os_error(error: BaseException, numbers: Sequence[int]) -> OSError | None:
    """Return the error of the disk in a chain of causes; a library or another process may give only text."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if isinstance(cause, OSError) and cause.errno in numbers:
            return cause
        text = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
        for number in numbers:
            if os.strerror(number) in text:
                return OSError(number, os.strerror(number))
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _is_full(folder: Path) -> bool:
    return folder.is_dir() and shutil.disk_usage(folder).free < _FULL_BYTES


def _why(error: OSError) -> str:
    words = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the quota is used up",
        errno.EROFS: "it is read-only",
        errno.EFBIG: "a file would be larger than this process may write (ulimit -f)",
        errno.EEXIST: "a file of that name is in its place",
        errno.ENOTDIR: "a part of its path is a file",
    }
    text = words.get(error.errno or 0)
    return f"{text} ({error.strerror})" if text else str(error.strerror or error)


def check_folders(args: Args) -> Iterator[Finding]:
    """Report why a run with these settings could not use its folders, without writing anything."""
    run_dir, save = Path(args.run_dir), Path(args.save or "")
    looks: list[tuple[str, Callable[[], object]]] = [
        ("--run-dir", lambda: refuse_unwritable("--run-dir", run_dir)),
        ("--run-dir", lambda: refuse_locked(run_dir, "--run-dir")),
        ("--run-dir", lambda: refuse_taken(args)),
        ("--load", lambda: _refuse_load(args)),
    ]
    if args.record_dir is not None:
        record_dir = Path(args.record_dir)
        looks.append(("--record-dir", lambda: refuse_unwritable("--record-dir", record_dir)))
    if args.save is not None:
        looks += [
            ("--save", lambda: refuse_unwritable("--save", save)),
            ("--save", lambda: refuse_locked(save, "--save")),
            ("--save", lambda: _refuse_others(args)),
        ]
    if args.save_hf is not None:
        there = _fixed_part(args.save_hf)
        looks += [
            ("--save-hf", lambda: refuse_unwritable("--save-hf", there)),
            ("--save-hf", lambda: _refuse_other_models(args)),
        ]
    load = args.load or ""
    if same_folder(args.load, args.save) and Path(load).is_dir() and not step_folders(load):
        text = f"{load} holds no checkpoint: nothing is resumed, the run starts at its first step."
        yield Finding("warning", "--load", text, group="folders")
    for flag, look in looks:
        try:
            look()
        except (ValueError, OSError) as error:
            yield replace(error_of(flag, error), group="folders")
            if look is looks[0][1]:  # what lies in an unusable folder is unusable, too
                return


def _refuse_load(args: Args) -> None:
    """Raise if --load cannot be resumed: it holds no checkpoint, or files that define its run changed."""
    checkpoint = resolve_load(args.load, args.save, args.ckpt_step)
    with contextlib.suppress(FolderInUse):  # which is reported of --run-dir
        if args.load is not None:
            compare_inputs(args, checkpoint, digest_inputs(args))


def refuse_unwritable(flag: str, folder: Path) -> None:
    """Try the folder, or the nearest one that exists, and leave nothing there."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.exists(p))
    before = there.stat()
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".slime-probe-", dir=there))
        os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))  # a check leaves no trace
    except OSError as error:
        raise ValueError(
            f"{flag} {folder} cannot be written: nothing can be made in {there} ({error.strerror}); give "
            "another folder."
        ) from None


def _refuse_others(args: Args) -> None:
    """Refuse a folder with checkpoints that this run does not resume: two runs would mix in it."""
    steps = step_folders(args.save or "")
    if steps and (not same_folder(args.load, args.save) or args.finetune):
        found = ", ".join(map(str, sorted(steps)[-3:]))
        hint = "without --finetune" if args.finetune else f"with --load {args.save}"
        raise FolderInUse(
            f"--save {args.save} holds checkpoints of an earlier run (the last are of rollouts {found}): "
            f"resume it {hint}, or give another folder."
        )


def _refuse_other_models(args: Args) -> None:
    """Raise FolderInUse where saving a model would replace something that this run did not write.

    A run that is resumed saves a rollout again, and replaces its own model.
    """
    template, is_resumed = args.save_hf or "", _is_resumed(args)
    for rollout_id in range(_LOOKED_AT if "{" in template else 1):
        path = Path(template.format(rollout_id=rollout_id))
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            continue
        has_model = (path / "config.json").is_file()
        if has_model and is_resumed and not same_folder(str(path), args.hf_checkpoint):
            continue
        held = "holds a model that this run did not write" if has_model else "holds no model"
        raise FolderInUse(
            f"--save-hf {path} exists and {held}: saving would replace it; give another name, or remove it."
        )


def _is_resumed(args: Args) -> bool:
    """Return whether this run continues an earlier one, whose exported models it may then replace."""
    if same_folder(args.load, args.save) and step_folders(args.load or "") and not args.finetune:
        return True
    with contextlib.suppress(FolderInUse):  # which is reported where the run folder is opened
        resumption = resumption_of(args.load, args.ckpt_step, args.finetune)
        return run_of_folder(Path(args.run_dir), resumption) is not None
    return False


def _least_bytes(args: Args) -> int:
    """Return the minimal size of a checkpoint: the model's weights, and as much for each moment of Adam.

    0: not known. FSDP keeps weights in fp32, so it is usually twice that; Megatron may keep them in 16 bits.
    """
    model = Path(args.hf_checkpoint or "")
    if args.lora_rank or args.debug_rollout_only or not args.hf_checkpoint or not model.is_dir():
        return 0
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    all_train = not (args.only_train_params_name_list or args.freeze_params_name_list)
    moments = OPTIMIZERS[args.optimizer].moments if all_train and not args.no_save_optim else 0
    return weights * (1 + moments) if moments else weights // 2


def _fixed_part(template: str) -> Path:
    """Return the folder of a template before its first placeholder."""
    return Path(template.partition("{")[0] + "x").parent
