"""Checks at the start of a run that all hosts see the files that the driver sees.

Folders that several hosts write to must be one shared folder: the driver writes a token file, and every other
host reads it. Files of models and of --load may be copies on each host, which must have the same size.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.arguments import Args
from slime.runtime.base import Runtime
from slime.utils.errors import RunStopped
from slime.utils.files.step_folders import StepFolder, same_folder

_NAMED = 3  # files in a message


@dataclass(frozen=True, slots=True)
class Needed:
    """A file that every host must read. `is_token`: the driver has just written it."""

    flag: str
    path: str
    num_bytes: int
    is_token: bool = False


def check_hosts(args: Args, runtime: Runtime, checkpoint: StepFolder | None) -> None:
    """Raise RunStopped with every host and folder that cannot be used; free where the run has one host."""
    if not runtime.other_hosts:
        return
    with contextlib.ExitStack() as tokens:
        needed = [tokens.enter_context(_token(flag, folder)) for flag, folder in shared_folders(args).items()]
        # What is missing on the driver is reported by who reads it.
        files = ((flag, path) for flag, paths in read_files(args, checkpoint).items() for path in paths)
        needed += [Needed(flag, str(path), path.stat().st_size) for flag, path in files if path.is_file()]
        answers = runtime.ask_other_hosts(find_unreadable, needed)
    flags = dict.fromkeys(one.flag for one in needed)
    problems = [_describe(host, found, flags) for host, found in answers.items() if found]
    if problems:
        shared = [flag for flag in flags if flag in shared_folders(args)]
        raise RunStopped(
            "\n".join(problems) + "\nPut these files into a folder that all hosts share (NFS, for example), "
            "under the same path on each host. A copy on each host, under the same path, is enough for all "
            f"but {', '.join(shared)}."
        )


def find_unreadable(needed: Iterable[Needed]) -> dict[str, list[str]]:
    """Return `path: reason` by flag for each file that this host cannot read as the driver does."""
    found: dict[str, list[str]] = {}
    for one in needed:
        reason = _why_unreadable(one)
        if reason is not None:
            shown = os.path.dirname(one.path) if one.is_token else one.path
            found.setdefault(one.flag, []).append(f"{shown}: {reason}")
    return found


def _why_unreadable(needed: Needed) -> str | None:
    try:
        with open(needed.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return "this host does not see the driver's folder" if needed.is_token else "there is no such file"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return f"it has {size} bytes, and {needed.num_bytes} on the driver" if size != needed.num_bytes else None


def shared_folders(args: Args) -> dict[str, Path]:
    """Return by flag the folders that several hosts write to or read from during the run."""
    folders = {"--run-dir": args.run_dir, "--save": args.save}
    folders["--update-weight-disk-dir"] = args.update_weight_disk_dir
    found = {flag: Path(folder) for flag, folder in folders.items() if folder}
    if args.save_hf:
        found["--save-hf"] = Path(args.save_hf.partition("{")[0] + "x").parent
    return found


def read_files(args: Args, checkpoint: StepFolder | None) -> dict[str, list[Path]]:
    """Return by flag the files that engines and ranks only read: models and the checkpoint."""
    models = {"--hf-checkpoint": args.hf_checkpoint, "--ref-load": args.ref_load}
    models |= {"--critic-load": args.critic_load, "--opd-teacher-load": args.opd_teacher_load}
    models |= {f"model {model.name!r}": model.model_path for model in args.engine_topology.models}
    files: dict[str, list[Path]] = {}
    listed: set[str] = set()
    for flag, model in models.items():
        if model and model not in listed and Path(model).is_dir():
            listed.add(model)
            files[flag] = sorted(path for path in Path(model).iterdir() if path.is_file())
    if checkpoint is not None and not same_folder(args.load, args.save):
        names = checkpoint.manifest.files or ()
        files["--load"] = [checkpoint.path / name for name in names]
    return files


@contextlib.contextmanager
def _token(flag: str, folder: Path) -> Iterator[Needed]:
    """Write a token file to a folder of the driver, until the block ends."""
    path = folder / f".slime-host-check-{secrets.token_hex(16)}"
    folder.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield Needed(flag, str(path), 0, is_token=True)
    finally:
        path.unlink(missing_ok=True)


def _describe(host: str, found: Mapping[str, list[str]] | Exception, flags: Iterable[str]) -> str:
    if isinstance(found, Exception):
        return f"Host {host} could not check the files of this run: {found}"
    lines = [f"Host {host} does not see all files of this run:"]
    for flag in flags:
        reasons = found.get(flag, [])
        more = f" (and {len(reasons) - _NAMED} more files)" if len(reasons) > _NAMED else ""
        lines += [f"  {flag}: {reason}" for reason in reasons[:_NAMED]]
        lines[-1] += more
    return "\n".join(lines)
