"""`slime ledger`: prove that no sample was lost or trained twice, show one sample."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.cli.inspect import command, report_copy
from slime.record import RecordError, Select, open_record, record_file
from slime.record.schema import EmptyRecord
from slime.utils.files.run_file import RunRecord, is_used, no_run, read_run, runs_inside
from slime.utils.files.step_folders import read_step, step_folders
from slime.utils.printable import printable


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return _audit(options) if options.action == "audit" else _show(options)
    except ValueError:
        if not _is_run(options.run):
            raise ValueError(no_run(options.run)) from None
        raise


def _audit(options: argparse.Namespace) -> int:
    inside = [] if _is_run(options.run) else runs_inside(options.run)  # a quick start contains two runs
    if not inside:
        return _audit_run(options, options.run)
    codes = []
    for run in inside:
        if not options.json:
            print(f"{run}:", flush=True)
        try:
            codes.append(_audit_run(options, run))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            codes.append(2)
    return max(codes)


def _audit_run(options: argparse.Namespace, folder: Path) -> int:
    from slime.record.audit import Audit, audit  # here: --help needs none of it

    report_copy(folder)
    run = read_run(folder)
    ended, saved = run is not None and run.last.exit == "finished", _saved(run)
    try:
        run_id = run.id if run is not None else None
        found = audit(record_file(folder), finished=ended, run_id=run_id, saved=saved)
    except EmptyRecord:
        if run is None or ended or saved or is_used(folder):
            raise
        found = Audit()  # killed before its first rollout
    if options.json:
        print(json.dumps({"run": str(folder), **vars(found), "finished": ended}))
        return 1 if found.violations else 0
    steps = f"{found.steps[0]} to {found.steps[-1]}" if found.steps else "none"
    print(f"{found.num_events} events of {found.num_starts} start(s); steps trained: {steps}")
    print(f"samples trained: {found.num_samples}; covered by a checkpoint: up to step {found.committed}")
    print("groups: " + (", ".join(f"{n} {what}" for what, n in sorted(found.groups.items())) or "none"))
    if found.redone or found.recalled:
        print(f"after crashes: {found.redone} steps repeated, {found.recalled} samples restored")
    if found.calls:
        print(f"calls of tools and environments: {found.calls}; repeated: {found.repeated_calls}")
        print(f"episodes after crashes: {found.continued} continued, {found.restarted} restarted")
    if found.unrecorded:
        print(f"steps {found.unrecorded}: samples are missing, only their outcomes are known (disk full?)")
    if found.unnumbered:
        print(f"steps {found.unnumbered}: samples have no group_index and cannot be audited")
    for violation in found.violations:
        print(f"VIOLATION: {violation}")
    if not found.num_events:
        print("the ledger is empty: there was no rollout yet")
    elif not found.violations:
        print("conserved: every group has one outcome, nothing was trained twice")
    return 1 if found.violations else 0


def _is_run(folder: Path) -> bool:
    return read_run(folder) is not None or record_file(folder).exists()


def _saved(run: RunRecord | None) -> list[int]:
    """Return the steps of this run's checkpoints."""
    if run is None or run.last.checkpoints is None:
        return []
    found = []
    for step, path in step_folders(run.last.checkpoints).items():
        with contextlib.suppress(ValueError):  # loading a damaged one reports it
            found += [step] if read_step(path).manifest.run_id == run.id else []
    return found


def _show(options: argparse.Namespace) -> int:
    report_copy(options.run)
    with open_record(options.run) as record:
        select = Select(kind="train", rollout_id=options.step, limit=1_000_000_000)
        samples = record.samples(select)
        if not samples:
            raise RecordError(f"{options.run}: the record has no samples of step {options.step}.")
        chosen = [a for a in samples if options.sample is None or a.sample_index == options.sample]
        if not chosen:
            numbers = sorted({a.sample_index for a in samples if a.sample_index is not None})
            raise RecordError(
                f"step {options.step} has no sample {options.sample}; it has {numbers[0]} to {numbers[-1]}."
            )
        for sample in chosen:
            tokens = record.tokens(sample.row)
            outcome = f"{sample.outcome}: {sample.reason}" if sample.reason else sample.outcome
            place = f"step {sample.rollout_id}  group {sample.group_index}  sample {sample.sample_index}"
            print(f"{place}  {outcome}")
            print(f"  {sample.status}, reward {sample.reward}, {sample.num_tokens} tokens")
            print(f"  prompt    {printable(sample.prompt)!r}")
            print(f"  response  {printable(sample.response)!r}")
            if sample.label is not None:
                print(f"  label     {printable(sample.label)!r}")
            print(f"  tokens    {tokens.ids}")
            log_probs = tokens.log_probs and [round(value, 4) for value in tokens.log_probs]
            print(f"  log-probs {log_probs}")
            print(f"  loss mask {'all ones' if tokens.loss_mask is None else tokens.loss_mask}")
            print(f"  versions  {tokens.versions}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime ledger", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    proof = "prove that every group has one outcome; exit code 1 if one was lost or trained twice"
    audit = actions.add_parser("audit", help=proof)
    audit.add_argument("--json", action="store_true", help="one JSON object")
    show = actions.add_parser("show", help="print samples with their tokens")
    show.add_argument("--step", type=int, required=True, help="the step")
    show.add_argument("--sample", type=int, help="index of the sample; default: all samples of the step")
    for action in (audit, show):
        action.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    return parser
