"""The checks in their order. One that needs what another found missing is left out, and says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from slime.arguments import Args
from slime.preflight.findings import Finding, Report, error_of
from slime.preflight.machine import check_machine, check_memory, plan_of
from slime.preflight.models import check_model_files, check_tokenizer, check_weights
from slime.preflight.packages import check_packages
from slime.preflight.prompts import check_lengths, check_rows
from slime.preflight.reward import check_reward
from slime.preflight.settings import check_loop, check_plugin_functions
from slime.preflight.stored import check_hub_login, check_megatron_folders, check_served

Check = Callable[[Args], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Look:
    """One check. `needs`: the checks that must have found no error before it."""

    group: str
    subject: str  # of what it raises
    check: Check
    needs: tuple[Check, ...] = ()
    skip: str | None = None  # word of --skip-preflight that leaves it out


LOOKS = (
    Look("settings", "plug-ins", check_plugin_functions),
    Look("packages", "packages", check_packages),
    Look("model", "--hf-checkpoint", check_model_files),
    Look("model", "--hf-checkpoint", check_weights, (check_model_files,)),
    Look("model", "--hf-checkpoint", check_tokenizer, (check_model_files,)),
    Look("model", "checkpoint", check_megatron_folders, (check_model_files,)),
    Look("model", "--rollout-engine", check_served, (check_model_files,)),
    Look("model", "--push-to-hub", check_hub_login),
    Look("data", "--prompt-data", check_rows),
    Look("data", "--prompt-data", check_lengths, (check_tokenizer, check_rows), "lengths"),
    Look(
        "reward",
        "reward",
        check_reward,
        (check_plugin_functions, check_tokenizer),  # without rows it looks at less
        "reward",
    ),
    Look("machine", "machine", check_machine, (), "machine"),
)


def preflight(args: Args, *, overlapped: bool = False) -> Report:
    """Everything that is wrong, all at once. Starts no engine and no trainer, and writes nothing.

    `overlapped`: the asynchronous loop will run these settings.
    """
    findings = list(check_loop(args, overlapped=overlapped))
    failed: set[Check] = set()
    for look in LOOKS:
        if look.skip is not None and look.skip in args.skip_preflight:
            continue
        if failed.intersection(look.needs):
            failed.add(look.check)  # and so what needs this one is left out, too
            continue
        found = [replace(finding, group=look.group) for finding in _guarded(look, args)]
        if any(finding.kind == "error" for finding in found):
            failed.add(look.check)
        findings += found
        if check_plugin_functions in failed and args.custom_rm_path:
            args = args.replace(custom_rm_path=None)  # rows are read for what a reward asks for; told already
    plan = None if check_model_files in failed else plan_of(args)
    if plan is not None and "machine" not in args.skip_preflight:
        findings += [replace(finding, group="machine") for finding in check_memory(args, plan)]
    return Report(tuple(findings), plan)


def _guarded(look: Look, args: Args) -> Iterator[Finding]:
    """A user's mistake is a finding. A defect of a check is told, and keeps no run from starting."""
    try:
        yield from look.check(args)
    except (ValueError, FileNotFoundError) as error:
        yield error_of(look.subject, error)
    except Exception as error:  # of a library, of a template, of ours
        text = f"this could not be looked at before the start ({type(error).__name__}: {error})."
        yield Finding("warning", look.subject, text)
