"""Packages that the chosen parts of a run import late: looked for now."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from slime.arguments import Args
from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import format_of
from slime.catalog.rewards import find_reward
from slime.catalog.sandboxes import SANDBOXES
from slime.catalog.trackers import TRACKERS, chosen_trackers
from slime.preflight.findings import Finding
from slime.utils.misc import is_installed, load_function

NEEDS_DOCSTRINGS = (
    "transformers makes its models of docstrings, and this Python runs without them (PYTHONOPTIMIZE=2, or "
    "-OO): unset it, or set it to 1"
)


def check_packages(args: Args) -> Iterator[Finding]:
    """One error for each that is missing, with the command that installs it, or that cannot work here."""
    if sys.flags.optimize > 1:
        yield Finding("error", "transformers", f"{NEEDS_DOCSTRINGS}.")
    for flag, module, install in _needed(args):
        if not is_installed(module):
            yield Finding("error", flag, f"needs the package {module}, which is not installed: {install}")
    row = None if args.custom_rm_path else find_reward(args.rm_type)
    protection = SANDBOXES[args.sandbox].protection
    if row is not None and row.runs_programs and protection is not None:
        try:
            yield Finding("note", "--sandbox", load_function(protection)())
        except RuntimeError as error:  # no sandbox of this kind starts here
            yield Finding("error", "--sandbox", f"{error}")


def _needed(args: Args) -> Iterator[tuple[str, str, str]]:
    trainer = BACKENDS[args.train_backend]
    for on, flag, module, extra in (
        *(
            (True, f"--use-{name}", TRACKERS[name].package, TRACKERS[name].extra)
            for name in chosen_trackers(args)
        ),
        (args.runtime == "ray", "--runtime ray", "ray", "ray"),
        (args.lora_rank > 0 and trainer.trains_transformers_model, "--lora-rank", "peft", "lora"),
        (args.update_weight_mode == "delta", "--update-weight-mode delta", "zstandard", "delta"),
    ):
        if on:
            yield flag, module, f"pip install 'slime[{extra}]'"
    if trainer.package:
        yield (
            f"--train-backend {args.train_backend}",
            trainer.package,
            f"pip install 'slime[{trainer.extra}]'",
        )
    row = None if args.custom_rm_path else find_reward(args.rm_type)
    if row is not None and row.package:
        yield f"--rm-type {args.rm_type}", row.package.replace("-", "_"), f"pip install 'slime[{row.extra}]'"
    box = SANDBOXES[args.sandbox]
    if box.package is not None:
        yield f"--sandbox {args.sandbox}", box.package, f"pip install 'slime[{box.extra}]'"
    files = [args.prompt_data, *(dataset.path for dataset in args.eval_datasets)]
    names = [name for file in files if file for name in ([file] if isinstance(file, str) else file)]
    for fmt in {format_of(name.partition("@[")[0]) for name in names}:
        if fmt is None or fmt.package is None:
            continue
        yield "--prompt-data", fmt.package, f"pip install 'slime[{fmt.extra}]'"
