"""What a look before the start has found, as values and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    An error would end the run or train something else than its user believes; a warning does not; a note says
    what was seen. Example: Finding("error", "--label-key", "no row of prompts.jsonl has a column 'answer'").
    """

    kind: Kind
    subject: str  # the flag or file that it is about
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    def of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def raise_errors(self) -> None:
        """One ValueError that lists everything that is wrong."""
        errors = self.of("error")
        if len(errors) == 1:
            raise ValueError(str(errors[0]))
        if errors:
            listed = "\n".join(f"  {number}. {error}" for number, error in enumerate(errors, 1))
            raise ValueError(f"{len(errors)} things keep this run from starting:\n{listed}")

    def lines(self) -> list[str]:
        """Errors first, then warnings, then notes; each on a line of its own."""
        return [f"{kind}: {finding}" for kind in ("error", "warning", "note") for finding in self.of(kind)]


def error_of(subject: str, error: Exception) -> Finding:
    """An exception of a check as a finding; what names its flag already is not named twice."""
    text = str(error).strip() or type(error).__name__
    head, _, rest = text.partition(": ")
    if rest and head.startswith(subject):
        return Finding("error", head, rest)
    return Finding("error", subject, text)


def collect(groups: Iterable[Iterable[Finding]]) -> Report:
    return Report(tuple(finding for group in groups for finding in group))
