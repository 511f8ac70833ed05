"""Runs the checks before the start of a run; a check is skipped if one that it depends on has failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime.arguments import Args
from slime.plugins import check_plugin, configured_plugins
from slime.preflight.findings import Finding, Report, error_of
from slime.utils.machine.own_command import as_typed
from slime.utils.misc import load_function


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check. Example: the tokenizer is checked only if the model's files exist."""

    group: str
    subject: str  # subject of its errors
    check: str  # function in this folder that gets the settings and yields findings
    needs: tuple[str, ...] = ()  # checks that must have passed
    skip: str | None = None  # value of --skip-preflight that skips it


PLUGINS, FILES, TOKENIZER, ROWS = "plug-in functions", "model files", "tokenizer", "prompt rows"
CHECKS = {
    PLUGINS: CheckRow("settings", "plug-ins", "all_checks.check_plugin_functions"),
    "packages": CheckRow("packages", "packages", "packages.check_packages"),
    "engine packages": CheckRow("packages", "--sglang-python", "packages.check_engine_packages"),
    FILES: CheckRow("model", "--hf-checkpoint", "models.check_model_files"),
    "weights": CheckRow("model", "--hf-checkpoint", "models.check_weights", (FILES,)),
    TOKENIZER: CheckRow("model", "--hf-checkpoint", "models.check_tokenizer", (FILES,)),
    "megatron folders": CheckRow("model", "checkpoint", "stored.check_megatron_folders", (FILES,)),
    "served model": CheckRow("model", "--rollout-engine", "stored.check_served", (FILES,)),
    "hub login": CheckRow("model", "--push-to-hub", "stored.check_hub_login"),
    ROWS: CheckRow("data", "--prompt-data", "prompts.check_rows"),
    "prompt lengths": CheckRow(
        "data", "--prompt-data", "prompts.check_lengths", (TOKENIZER, ROWS), "lengths"
    ),
    "reward": CheckRow("reward", "reward", "reward.check_reward", (PLUGINS, TOKENIZER, ROWS), "reward"),
    "machine": CheckRow("machine", "machine", "machine.check_machine", (), "machine"),
}


def preflight(args: Args, *, overlapped: bool = False) -> Report:
    """Return a report of all problems; nothing is started. `overlapped`: for the asynchronous loop."""
    findings = list(check_loop(args, overlapped=overlapped))
    failed: set[str] = set()
    for name, row in CHECKS.items():
        if row.skip is not None and row.skip in args.skip_preflight:
            continue
        if failed.intersection(row.needs):
            failed.add(name)  # checks that depend on this one are skipped, too
            continue
        found = [replace(finding, group=row.group) for finding in _guarded(row, args)]
        if any(finding.kind == "error" for finding in found):
            failed.add(name)
        findings += found
        if PLUGINS in failed and args.custom_rm_path:
            args = args.replace(custom_rm_path=None)  # reported already
    plan = None
    if FILES not in failed:
        plan, found = load_function("slime.preflight.machine.predict")(args)
        findings += [replace(finding, group="machine") for finding in found]
    return Report(tuple(findings), plan)


def check_plugin_functions(args: Args) -> Iterator[Finding]:
    """Load every configured function, and compare its parameters with the call."""
    for point, path, where in configured_plugins(args):
        try:
            check_plugin(point, path, where)
        except ValueError as error:
            yield error_of(where, error)


def check_loop(args: Args, *, overlapped: bool) -> Iterator[Finding]:
    """Report flags that only the other loop obeys."""
    if overlapped and args.colocate:
        text = f"it makes engines and trainer take turns: use train.py ({as_typed('train')})"
        yield Finding("error", "--colocate", text, "settings")
    if not overlapped and args.update_weights_interval != 1:
        text = f"it needs train_async.py ({as_typed('train-async')})"
        yield Finding("error", "--update-weights-interval", text, "settings")


def _guarded(row: CheckRow, args: Args) -> Iterator[Finding]:
    """Yield the findings of a check. A defect of the check itself is a warning: the run can start."""
    try:
        yield from load_function(f"slime.preflight.{row.check}")(args)
    except (ValueError, FileNotFoundError) as error:
        yield error_of(row.subject, error)
    except Exception as error:  # of a library, of a template, of slime
        text = f"this check failed with an error of its own ({type(error).__name__}: {error})."
        yield Finding("warning", row.subject, text)
