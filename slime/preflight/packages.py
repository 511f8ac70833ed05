"""Checks that packages which parts of a run import late are installed."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

from slime.arguments import Args
from slime.arguments.core.devices import visible_gpus
from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import format_of
from slime.catalog.engines import ENGINES
from slime.catalog.rewards import find_reward
from slime.catalog.sandboxes import SANDBOXES
from slime.catalog.trackers import TRACKERS, chosen_trackers
from slime.preflight.findings import Finding
from slime.utils.misc import is_installed, load_function

_ASK_TIMEOUT_S = 60
_LIST_PACKAGES = (
    "import importlib.metadata as m; print(*{f'{d.name}=={d.version}' for d in m.distributions()})"
)
# What moves the KV cache from engines that prefill to those that decode: SGLang's name -> its package.
_TRANSFERS = {"mooncake": "mooncake-transfer-engine", "nixl": "nixl"}
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
    if not kind.own_python or alone or args.rollout_external_engine_addrs or not visible_gpus():
        return
    if args.lora_sync == "adapter":
        return
    # Imported here: they load torch.
    from slime.weight_sync.base import Site
    from slime.weight_sync.transports import choose_transport

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


def check_transfer(args: Args) -> Iterator[Finding]:
    """Report what keeps engines that prefill from sending the KV cache to those that decode."""
    split = [
        group for model in args.engine_topology.models if model.is_disaggregated for group in model.groups
    ]
    if not split or args.debug_train_only or args.rollout_external_engine_addrs:
        return
    flag = "--prefill-num-servers" if args.prefill_num_servers else "--sglang-config"
    if not visible_gpus():
        text = (
            "engines that only prefill or decode need GPUs: none of SGLang's ways to send the KV cache works "
            "between servers on a CPU; use regular engines"
        )
        yield Finding("error", flag, text)
        return
    assert args.sglang_python is not None, "rules of the arguments find SGLang's interpreter"
    own = vars(args).get("sglang_disaggregation_transfer_backend") or "mooncake"
    chosen = {group.overrides.get("disaggregation_transfer_backend", own) for group in split}
    installed = packages_of(args.sglang_python)
    for name in sorted(chosen & _TRANSFERS.keys()):
        package = _TRANSFERS[name]
        if installed and not any(found.startswith(package) for found in installed):
            text = f"sends the KV cache by {name}, which SGLang's environment lacks: "
            yield Finding("error", flag, f"{text}`{args.sglang_python} -m pip install {package}`")


def nccl_of(python: str) -> str | None:
    """Return the NCCL package of an environment, with its version; None: torch there may have another."""
    found = [package for package in packages_of(python) if package.startswith("nvidia-nccl-")]
    return found[0] if len(found) == 1 else None


@functools.cache
def packages_of(python: str) -> tuple[str, ...]:
    """Return the packages of an interpreter's environment as `name==version`; none if it does not answer."""
    try:
        done = subprocess.run(
            [python, "-c", _LIST_PACKAGES], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split())


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
