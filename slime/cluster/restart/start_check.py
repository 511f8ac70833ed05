"""Whether what new ranks begin from is what was written: they look themselves, before they load it."""

from __future__ import annotations

from pathlib import Path

from slime.cluster.restart.redo import SafeState, UnreadableState
from slime.cluster.training.train_group import RankProcesses
from slime.utils.files.machine_copies import CopyPlace
from slime.utils.files.step_folders import DamagedCheckpoint, NewerCheckpoint, read_step

_NAMED = 3  # files that a message lists


def readable(state: SafeState, ranks: RankProcesses, *, verify: bool) -> Path | CopyPlace | None:
    """The state as ranks load it; UnreadableState where it is damaged. `verify` False: disks are trusted."""
    if state.folder is None:
        return None
    if state.copied is not None:
        place = ranks.copy_place(state.folder)
        damage = ranks.complete_copy(place, state.copied)
        _refuse(damage, f"the copy in memory of step {state.rollout_id + 1}")
        return place
    if verify:
        path = state.folder.parent
        try:
            step = read_step(path)
        except (DamagedCheckpoint, NewerCheckpoint) as error:
            raise UnreadableState(str(error)) from error
        _refuse(ranks.find_damage(path, step.manifest.files or {}), str(path))
    return state.folder


def _refuse(damage: list[str], what: str) -> None:
    if damage:
        more = f" and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
        raise UnreadableState(f"{what} is damaged: {'; '.join(damage[:_NAMED])}{more}")
