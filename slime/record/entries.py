"""What is written of a prompt group: its samples, and what became of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from slime.utils.types import Sample, flatten_samples


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt group with its outcome.

    Example: Entry((sample, sample), "filtered", "zero_std_1.0") is a group that a filter dropped because
    all of its answers were right. `dataset` is the name of an evaluation's.
    """

    samples: tuple[Sample, ...]
    outcome: str = "trained"
    reason: str | None = None
    dataset: str | None = None


def group_entries(
    samples: Sequence[Sample | Sequence[Sample | Sequence[Sample]]],
    outcome: str,
    reason: str | None = None,
    dataset: str | None = None,
) -> list[Entry]:
    """Entries of what a rollout function returned: groups, or a flat list of samples with group indices."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for number, item in enumerate(samples):
        for sample in flatten_samples([item]):
            index = sample.group_index
            key = ("position", number) if index is None else ("index", index)
            groups.setdefault(key, []).append(sample)
    return [Entry(tuple(group), outcome, reason, dataset) for group in groups.values()]


def prompt_text(prompt: object) -> str:
    """A prompt as one text: as it is, or a conversation with a line for each role."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)):
        return "\n".join(_message_text(message) for message in prompt)
    return str(prompt)


def prompt_hash(text: str) -> int:
    """A number by which the same prompt is found again, also in another record."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _message_text(message: object) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    if isinstance(content, list):  # parts of a multimodal message
        parts = [
            part.get("text", f"[{part.get('type', '?')}]") if isinstance(part, dict) else part
            for part in content
        ]
        content = " ".join(map(str, parts))
    return f"{message.get('role', '?')}: {content}"
