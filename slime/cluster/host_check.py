"""Checks at the start of a run that all hosts have the same packages and see the files that the driver sees.

Folders that several hosts write to must be one shared folder: the driver writes a token file, and every other
host reads it. Files of models and of --load may be copies on each host, which must have the same size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.arguments import Args
from slime.preflight.findings import Finding
from slime.preflight.host_facts import HostFacts, compare_hosts, host_facts, host_lines
from slime.runtime import create_runtime
from slime.runtime.base import Runtime
from slime.utils.errors import RunStopped
from slime.utils.files.step_folders import StepFolder, same_folder
from slime.utils.machine import shm
from slime.utils.machine.ports import is_own
from slime.utils.machine.run_identity import LOOPBACK

logger = logging.getLogger(__name__)

_NAMED = 3  # files in a message
_HOSTS = "hosts"  # the value of --skip-preflight that skips the comparison of hosts


@dataclass(frozen=True, slots=True)
class Needed:
    """A file that every host must read. `is_token`: the driver has just written it."""

    flag: str
    path: str
    num_bytes: int
    is_token: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What a host is asked: about itself, and which of these files it cannot read."""

    needed: tuple[Needed, ...]
    folders: tuple[str, ...]
    addresses: tuple[str, ...]  # of all hosts, by which the scheduler knows them
    env: dict[str, str]  # what the user sets for trainer ranks


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answers. `unreadable`: reasons by flag."""

    facts: HostFacts
    unreadable: dict[str, list[str]]


def answer(question: Question) -> Answer:
    """Return what this host says to a question."""
    own = next(filter(is_own, question.addresses), LOOPBACK)
    return Answer(host_facts(own, question.folders, question.env), find_unreadable(question.needed))


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a run, the driver's first: what they are, and what keeps a run from starting."""

    facts: dict[str, HostFacts]
    findings: tuple[Finding, ...]
    problems: str  # of files; empty: none

    @property
    def lines(self) -> list[str]:
        return host_lines(self.facts)


def check_hosts(args: Args, runtime: Runtime, checkpoint: StepFolder | None) -> None:
    """Raise RunStopped with every host and folder that cannot be used; free where the run has one host."""
    if not runtime.other_hosts:
        return
    hosts = ask_hosts(args, runtime, checkpoint, is_start=True)
    findings = () if _HOSTS in args.skip_preflight else hosts.findings
    errors = [f"Host {finding}" for finding in findings if finding.kind == "error"]
    for finding in findings:
        if finding.kind == "warning":
            logger.warning("Host %s", finding)
    if errors:
        errors.append("These hosts would not compute the same. --skip-preflight hosts starts the run anyway.")
    if errors or hosts.problems:
        raise RunStopped("\n".join([*errors, *filter(None, [hosts.problems])]))


def ask_hosts(args: Args, runtime: Runtime, checkpoint: StepFolder | None, *, is_start: bool) -> Hosts:
    """Ask every host about itself and about the files of the run. `is_start`: the run makes its folders."""
    with contextlib.ExitStack() as tokens:
        written = (_token(flag, folder, is_start) for flag, folder in shared_folders(args).items())
        needed = [tokens.enter_context(token) for token in written]
        # What is missing on the driver is reported by who reads it.
        files = ((flag, path) for flag, paths in read_files(args, checkpoint).items() for path in paths)
        needed += [Needed(flag, str(path), path.stat().st_size) for flag, path in files if path.is_file()]
        folders, own = tuple(str(one) for one in shared_folders(args).values()), runtime.driver_address
        addresses = tuple(host.rpartition("(")[2].rstrip(")") for host in runtime.other_hosts)
        env = {name: str(value) for name, value in (args.train_env_vars or {}).items()}
        started = time.time()
        answers = runtime.ask_other_hosts(answer, Question(tuple(needed), folders, addresses, env))
        asked = started, time.time()
        facts = {f"{socket.gethostname()} ({own})": host_facts(own, folders, env)}
    facts |= {host: found.facts for host, found in answers.items() if isinstance(found, Answer)}
    flags = dict.fromkeys(one.flag for one in needed)
    wrong = {
        host: found.unreadable if isinstance(found, Answer) else found for host, found in answers.items()
    }
    problems = [_describe(host, found, flags) for host, found in wrong.items() if found]
    if any(found and not isinstance(found, Exception) for found in wrong.values()):
        shared = [flag for flag in flags if flag in shared_folders(args)]
        problems.append(
            "Put these files into a folder that all hosts share (NFS, for example), under the same path on "
            "each host. A copy on each host, under the same path, is enough for all "
            f"but {', '.join(shared)}."
        )
    return Hosts(facts, tuple(compare_hosts(facts, asked)), "\n".join(problems))


def report_hosts(args: Args) -> tuple[list[str], list[str]]:
    """Return lines about every host of the cluster, and the problems that would keep a run from starting."""
    runtime = create_runtime(args, Path(args.run_dir), shm.make_prefix())
    try:
        runtime.use_all_hosts()
        if not runtime.other_hosts:
            return ["hosts:", "  this machine alone; for others, start Ray on them and set RAY_ADDRESS"], []
        hosts = ask_hosts(args, runtime, None, is_start=False)
    finally:
        runtime.close()
    shown = [f"  {finding.kind}: {finding}" for finding in hosts.findings]
    errors = [f"Host {finding}" for finding in hosts.findings if finding.kind == "error"]
    return ["hosts:", *hosts.lines, *shown], [*errors, *filter(None, [hosts.problems])]


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
def _token(flag: str, folder: Path, is_start: bool) -> Iterator[Needed]:
    """Write a token file to a folder of the driver, until the block ends.

    `is_start` False: where the folder is missing, write it to the folder in which the run will make it.
    """
    folder = folder.absolute()
    if is_start:
        folder.mkdir(parents=True, exist_ok=True)
    folder = next(one for one in (folder, *folder.parents) if one.is_dir())
    path = folder / f".slime-host-check-{secrets.token_hex(16)}"
    path.touch()
    try:
        yield Needed(flag, str(path), 0, is_token=True)
    finally:
        path.unlink(missing_ok=True)


def _describe(host: str, found: Mapping[str, list[str]] | Exception, flags: Iterable[str]) -> str:
    if isinstance(found, Exception):
        return (
            f"Host {host} could not check the files of this run: {found}\n"
            "  Ray cannot start a process on a host whose /tmp or memory is full: make room there."
        )
    lines = [f"Host {host} does not see all files of this run:"]
    for flag in flags:
        reasons = found.get(flag, [])
        more = f" (and {len(reasons) - _NAMED} more files)" if len(reasons) > _NAMED else ""
        lines += [f"  {flag}: {reason}" for reason in reasons[:_NAMED]]
        lines[-1] += more
    return "\n".join(lines)
