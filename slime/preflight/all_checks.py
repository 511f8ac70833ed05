"""Runs the checks before the start of a run. A check that needs what another found missing is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime.arguments import Args
from slime.catalog.checks import CHECKS, MODEL_FILES, PLUGINS, PREDICT, CheckRow
from slime.preflight.findings import Finding, Report, error_of
from slime.utils.machine.own_command import as_typed
from slime.utils.misc import load_function


def preflight(args: Args, *, overlapped: bool = False) -> Report:
    """Report all problems at once. Starts no engine and no trainer, and writes nothing.

    `overlapped`: the asynchronous loop will run these settings.
    """
    findings = list(check_loop(args, overlapped=overlapped))
    failed: set[str] = set()
    for name, row in CHECKS.items():
        if row.skip is not None and row.skip in args.skip_preflight:
            continue
        if failed.intersection(row.needs):
            failed.add(name)  # and so what needs this one is left out, too
            continue
        found = [replace(finding, group=row.group) for finding in _guarded(row, args)]
        if any(finding.kind == "error" for finding in found):
            failed.add(name)
        findings += found
        if PLUGINS in failed and args.custom_rm_path:
            args = args.replace(custom_rm_path=None)  # reported already
    plan = None
    if MODEL_FILES not in failed:
        plan, found = load_function(PREDICT)(args)
        findings += [replace(finding, group="machine") for finding in found]
    return Report(tuple(findings), plan)


def check_loop(args: Args, *, overlapped: bool) -> Iterator[Finding]:
    """Report flags that only the other loop obeys."""
    if overlapped and args.colocate:
        yield Finding(
            "error",
            "--colocate",
            "it makes engines and trainer take turns, so nothing can overlap: use train.py "
            f"({as_typed('train')})",
            "settings",
        )
    if not overlapped and args.update_weights_interval != 1:
        yield Finding(
            "error",
            "--update-weights-interval",
            f"it needs train_async.py ({as_typed('train-async')}): here engines get weights after every "
            "rollout",
            "settings",
        )


def _guarded(row: CheckRow, args: Args) -> Iterator[Finding]:
    """Yield the findings of a check. A defect of the check itself is a warning: the run can start."""
    try:
        yield from load_function(row.check)(args)
    except (ValueError, FileNotFoundError) as error:
        yield error_of(row.subject, error)
    except Exception as error:  # of a library, of a template, of ours
        text = f"this could not be checked before the start ({type(error).__name__}: {error})."
        yield Finding("warning", row.subject, text)
