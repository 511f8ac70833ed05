"""Rules about how weights reach the engines."""

import importlib.util

from slime.arguments.core.draft import Draft
from slime.catalog.transports import OLDER_NAMES

# What each checksum imports, and how pip calls it; none: the standard library has it.
_CHECKSUM_PACKAGES = {"xxh3-128": ("xxhash", "'slime[delta]'"), "blake3": ("blake3", "blake3")}


def weight_sync(draft: Draft) -> None:
    if draft.update_weight_transport == "disk" and draft.update_weight_disk_dir is None:
        raise ValueError(
            "--update-weight-transport disk needs --update-weight-disk-dir: a folder that engines can read."
        )
    older = draft.update_weight_transport
    if older in OLDER_NAMES:
        draft.derive("update_weight_transport", OLDER_NAMES[older], f"{older} is its older name")
    if draft.update_weight_mode == "delta":
        _delta(draft)


def _delta(draft: Draft) -> None:
    if draft.update_weight_transport not in ("auto", "disk"):
        raise ValueError(
            f"--update-weight-mode delta goes through a folder, but --update-weight-transport is "
            f"{draft.update_weight_transport}; use auto or disk, or --update-weight-mode full."
        )
    _need("zstandard", "'slime[delta]'", "--update-weight-mode delta", "--update-weight-mode full")
    checksum = draft.update_weight_delta_checksum
    if checksum in _CHECKSUM_PACKAGES:
        other = "--update-weight-delta-checksum adler32"
        _need(*_CHECKSUM_PACKAGES[checksum], f"--update-weight-delta-checksum {checksum}", other)
    agents, engines = draft.weight_agent_addrs, draft.rollout_external_engine_addrs or []
    if agents is not None and len(agents) != len(engines):
        raise ValueError(
            f"--weight-agent-addrs names {len(agents)} agents for {len(engines)} engines of "
            "--rollout-external-engine-addrs; give one for each, in the same order."
        )


def _need(module: str, package: str, flag: str, instead: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{flag} needs the package {module}, which is not installed; pip install {package}, or use "
            f"{instead}."
        )
