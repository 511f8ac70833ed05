"""The `ifbench` reward: 1 when a response obeys every verifiable instruction of its prompt, else 0."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from slime.rollout.rm_hub.instructions import CHECKS
from slime.utils.reward_failure import RewardFailure, invalid


def compute_ifbench_reward(
    response: str, label: Any = None, metadata: Mapping[str, Any] | None = None
) -> float | RewardFailure:
    """1.0 or 0.0; `invalid` when the instructions are missing, unknown or their arguments do not fit.

    `instruction_id_list` (list of ids) and `kwargs` (one mapping per id; null values are ignored) come from
    the metadata, or from the label when that is such a mapping or its JSON text.
    """
    source = _instruction_source(label, metadata or {})
    ids = source.get("instruction_id_list")
    if not ids:
        return invalid("ifbench: neither metadata nor label holds an instruction_id_list")
    all_kwargs = source.get("kwargs") or [{}] * len(ids)
    if len(all_kwargs) != len(ids):
        return invalid(f"ifbench: {len(ids)} instruction ids but {len(all_kwargs)} kwargs")
    verdicts = [_obeys(response, name, kwargs or {}) for name, kwargs in zip(ids, all_kwargs, strict=True)]
    broken = [verdict for verdict in verdicts if isinstance(verdict, RewardFailure)]
    return broken[0] if broken else float(all(verdicts))


def _instruction_source(label: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    if metadata.get("instruction_id_list"):
        return metadata
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            return metadata  # an ordinary text label
    return label if isinstance(label, Mapping) else metadata


def _obeys(response: str, name: str, kwargs: Mapping[str, Any]) -> bool | RewardFailure:
    check = CHECKS.get(name)
    if check is None:
        near = difflib.get_close_matches(name, CHECKS, n=1)
        hint = f"; nearest known: {near[0]}" if near else ""
        return invalid(f"ifbench: unknown instruction id {name!r}{hint}")
    given = {key: value for key, value in kwargs.items() if value is not None}
    try:
        # An empty answer obeys no instruction, though it has no comma either.
        return bool(response.strip()) and bool(check(response, **given))
    except (TypeError, ValueError) as error:
        return invalid(f"ifbench: instruction {name} with {given}: {error}")
