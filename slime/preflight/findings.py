"""Findings of the preflight check, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from slime.utils.errors import NotStarted
from slime.utils.printable import printable

Kind = Literal["error", "warning", "note"]
COST = "memory and time"  # subject of the estimates of memory and time
KINDS: tuple[Kind, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    An error would end the run or train something other than intended; a warning would not; a note is
    information. Example: Finding("error", "--label-key", "no row of prompts.jsonl has a column 'answer'").
    """

    kind: Kind
    subject: str  # the flag or file that it is about
    text: str
    group: str = ""  # the subject of the check: settings, packages, model, data, reward, machine

    def __str__(self) -> str:
        return printable(f"{self.subject}: {self.text}")


class Prediction(Protocol):
    """Predicted memory and time of a step, see `slime.preflight.run_plan.RunPlan`."""

    def against(self, seconds: float, trainer_bytes: float | None, response_tokens: float | None) -> str:
        """Return one line that compares the prediction with the measured step, memory and response length."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings in the order of the checks, which a run logs at its start and `slime doctor` prints."""

    findings: tuple[Finding, ...]
    plan: Prediction | None = None  # the predicted cost; None: the model cannot be read on this machine

    def of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def groups(self) -> dict[str, list[Finding]]:
        """Return findings by subject; errors first in each."""
        found: dict[str, list[Finding]] = {finding.group: [] for finding in self.findings}
        for kind in KINDS:
            for finding in self.of(kind):
                found[finding.group].append(finding)
        return found

    def raise_errors(self) -> None:
        """Raise one NotStarted that lists all errors."""
        errors = self.of("error")
        if len(errors) == 1:
            raise NotStarted(str(errors[0]))
        if errors:
            listed = "\n".join(Report(tuple(errors)).lines())
            raise NotStarted(f"{len(errors)} problems found; nothing was started:\n{listed}")

    def lines(self) -> list[str]:
        """Return the text of the report: each subject, and below it its findings."""
        found = []
        for group, findings in self.groups().items():
            found += [f"{group}:", *(f"  {f.kind}: {f}".replace("\n", "\n    ") for f in findings)]
        return found


def error_of(subject: str, error: Exception) -> Finding:
    """Return an exception of a check as a finding; a flag that it names already is not named twice."""
    text = str(error).strip() or type(error).__name__
    head, _, rest = text.partition(": ")
    if rest and head.startswith(subject):
        return Finding("error", head, rest)
    return Finding("error", subject, text)
