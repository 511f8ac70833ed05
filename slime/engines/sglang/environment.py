"""Checks the environment that SGLang runs in, by its list of packages; nothing of it is imported."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

from slime.arguments import Args
from slime.arguments.core.devices import visible_gpus

_ASK_TIMEOUT_S = 60
_LIST_PACKAGES = (
    "import importlib.metadata as m; print(*{f'{d.name}=={d.version}' for d in m.distributions()})"
)
# What moves the KV cache from prefill to decode engines: SGLang's name -> its package.
_TRANSFERS = {
    "mooncake": "mooncake-transfer-engine",
    "mooncake_tcp": "mooncake-transfer-engine",
    "nixl": "nixl",
}
_ON_CPU = "mooncake_tcp"


def find_problems(args: Args, transport: str | None) -> Iterator[tuple[str, str]]:
    """Yield flag and problem of each part of a run that this environment cannot do.

    `transport`: of weights; None: there are no pushes, or adapters alone.
    """
    if transport == "distributed" and visible_gpus():
        yield from _find_other_nccl(args)
    yield from _find_missing_transfer(args)


def _find_other_nccl(args: Args) -> Iterator[tuple[str, str]]:
    """Report that a group of trainer and engines would have two versions of NCCL, which NCCL refuses."""
    assert args.sglang_python is not None, "rules of the arguments find SGLang's interpreter"
    ours, theirs = nccl_of(sys.executable), nccl_of(args.sglang_python)
    if ours and theirs and ours.partition("==")[2] != theirs.partition("==")[2]:
        text = (
            f"trainer ({ours}) and SGLang ({theirs}) cannot form a process group, because NCCL refuses "
            "other versions of itself: install one in both environments "
            f"(`{args.sglang_python} -m pip install {ours}`, if torch there works with it), or use "
            "--update-weight-transport disk --update-weight-disk-dir DIR"
        )
        yield "--update-weight-transport", text


def _find_missing_transfer(args: Args) -> Iterator[tuple[str, str]]:
    """Report what keeps prefill engines from sending the KV cache to decode engines."""
    split = [
        group for model in args.engine_topology.models if model.is_disaggregated for group in model.groups
    ]
    if not split:
        return
    flag = "--prefill-num-servers" if args.prefill_num_servers else "--sglang-config"
    own = vars(args).get("sglang_disaggregation_transfer_backend") or "mooncake"
    chosen = {group.overrides.get("disaggregation_transfer_backend", own) for group in split}
    if not visible_gpus() and chosen != {_ON_CPU}:
        text = (
            f"sends the KV cache by {', '.join(sorted(chosen))}, which needs GPUs; on a CPU add "
            f"--sglang-disaggregation-transfer-backend {_ON_CPU}, or use regular engines"
        )
        yield flag, text
        return
    assert args.sglang_python is not None, "rules of the arguments find SGLang's interpreter"
    installed = packages_of(args.sglang_python)
    for name in sorted(chosen & _TRANSFERS.keys()):
        package = _TRANSFERS[name]
        if installed and not any(found.startswith(package) for found in installed):
            package += "" if visible_gpus() else "-non-cuda"
            text = f"sends the KV cache by {name}, which SGLang's environment lacks: "
            yield flag, (f"{text}`{args.sglang_python} -m pip install {package}`")


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
