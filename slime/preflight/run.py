"""The checks in their order. One that needs what another found missing is left out, and says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime.arguments import Args
from slime.preflight.machine import check_machine
from slime.preflight.models import check_model_files, check_tokenizer
from slime.preflight.packages import check_packages
from slime.preflight.prompts import check_lengths, check_rows
from slime.preflight.report import Finding, Report, error_of
from slime.preflight.reward import check_reward

Check = Callable[[Args], Iterator[Finding]]

# Subject of what a check raises, the check, and which checks must have found no error before it.
CHECKS: tuple[tuple[str, Check, tuple[Check, ...]], ...] = (
    ("packages", check_packages, ()),
    ("--hf-checkpoint", check_model_files, ()),
    ("--hf-checkpoint", check_tokenizer, (check_model_files,)),
    ("--prompt-data", check_rows, ()),
    ("--prompt-data", check_lengths, (check_tokenizer, check_rows)),
    ("reward", check_reward, (check_packages, check_tokenizer, check_rows)),
    ("machine", check_machine, ()),
)


def preflight(args: Args) -> Report:
    """Everything that is wrong, all at once. Starts no engine and no trainer, and changes nothing."""
    findings: list[Finding] = []
    failed: set[Check] = set()
    for subject, check, needed in CHECKS:
        if failed.intersection(needed):
            failed.add(check)  # and so what needs this one is left out, too
            continue
        found = list(_guarded(subject, check, args))
        if any(finding.kind == "error" for finding in found):
            failed.add(check)
        findings += found
    return Report(tuple(findings))


def _guarded(subject: str, check: Check, args: Args) -> Iterator[Finding]:
    """A user's mistake is a finding; any other exception is a defect of the check and rises."""
    try:
        yield from check(args)
    except (ValueError, FileNotFoundError) as error:
        yield error_of(subject, error)
