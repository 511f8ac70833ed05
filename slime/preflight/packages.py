"""Checks that packages which parts of a run import late are installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from slime.arguments import Args
from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import format_of
from slime.catalog.engines import ENGINES
from slime.catalog.rewards import find_reward
from slime.catalog.sandboxes import SANDBOXES
from slime.catalog.trackers import TRACKERS, chosen_trackers
from slime.preflight.findings import Finding
from slime.utils.machine.accelerator import device_count
from slime.utils.misc import is_installed, load_function
from slime.weight_sync.base import Site
from slime.weight_sync.transports import choose_transport

_NCCL_TIMEOUT_S = 60
# Prints the NCCL package of an environment, or nothing if torch there has another NCCL.
_PRINT_NCCL = """
import importlib.metadata as m
found = ((str(d.name), d.version) for d in m.distributions())
print(*sorted({f"{name}=={version}" for name, version in found if name.startswith("nvidia-nccl-")}))
"""
NEEDS_DOCSTRINGS = (
    "transformers makes its models of docstrings, and this Python runs without them (PYTHONOPTIMIZE=2, or "
    "-OO): unset it, or set it to 1"
)


def check_packages(args: Args) -> Iterator[Finding]:
    """Report each package that is missing, with the command that installs it, or that cannot work here."""
    if sys.flags.optimize > 1:
        yield Finding("error", "transformers", f"{NEEDS_DOCSTRINGS}.")
    for flag, module, extra in _needed(args):
        if not is_installed(module):
            text = f"needs the package {module}, which is not installed: pip install 'slime-rl[{extra}]'"
            yield Finding("error", flag, text)
    row = None if args.custom_rm_path else find_reward(args.rm_type)
    protection = SANDBOXES[args.sandbox].protection
    if row is not None and row.runs_programs and protection is not None:
        try:
            yield Finding("note", "--sandbox", load_function(protection)())
        except RuntimeError as error:  # no sandbox of this kind starts here
            yield Finding("error", "--sandbox", f"{error}")


def check_nccl(args: Args) -> Iterator[Finding]:
    """Report that a group of trainer and engines would have two versions of NCCL, which NCCL refuses."""
    kind, alone = ENGINES[args.rollout_engine], args.debug_train_only or args.debug_rollout_only
    if not kind.own_python or alone or args.rollout_external_engine_addrs or not device_count():
        return
    if args.lora_sync == "adapter":
        return
    site = Site(cuda=True, colocated=args.colocate)
    wanted, mode = args.update_weight_transport, args.update_weight_mode
    if choose_transport(wanted, kind.dialect.transports, site, mode) != "distributed":
        return
    assert args.sglang_python is not None, "rules of the arguments find SGLang's interpreter"
    ours, theirs = nccl_of(sys.executable), nccl_of(args.sglang_python)
    if ours and theirs and ours.partition("==")[2] != theirs.partition("==")[2]:
        text = (
            f"trainer ({ours}) and {kind.label} ({theirs}) cannot form a process group, because NCCL refuses "
            "other versions of itself: install one in both environments "
            f"(`{args.sglang_python} -m pip install {ours}`, if torch there works with it), or use "
            "--update-weight-transport disk --update-weight-disk-dir DIR"
        )
        yield Finding("error", "--update-weight-transport", text)


def nccl_of(python: str) -> str | None:
    """Return the NCCL package of an interpreter's environment, with its version; None: it is not known."""
    try:
        words = [python, "-c", _PRINT_NCCL]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_NCCL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.split()
    return found[0] if len(found) == 1 else None


def _needed(args: Args) -> Iterator[tuple[str, str, str | None]]:
    """Yield flag, module and the extra of slime that installs it."""
    for name in chosen_trackers(args):
        yield f"--use-{name}", TRACKERS[name].package, TRACKERS[name].extra
    trainer = BACKENDS[args.train_backend]
    if args.runtime == "ray":
        yield "--runtime ray", "ray", "ray"
    if args.lora_rank > 0 and trainer.trains_transformers_model:
        yield "--lora-rank", "peft", "lora"
    if args.update_weight_mode == "delta":
        yield "--update-weight-mode delta", "zstandard", "delta"
    files = [args.prompt_data, *(dataset.path for dataset in args.eval_datasets)]
    names = [name for file in files if file for name in ([file] if isinstance(file, str) else file)]
    for flag, row in (
        (f"--train-backend {args.train_backend}", trainer),
        (f"--rm-type {args.rm_type}", None if args.custom_rm_path else find_reward(args.rm_type)),
        (f"--sandbox {args.sandbox}", SANDBOXES[args.sandbox]),
        *(("--prompt-data", row) for row in {format_of(name.partition("@[")[0]) for name in names}),
    ):
        if row is not None and row.package is not None:
            yield flag, row.package.replace("-", "_"), row.extra
