"""Checks that packages which parts of a run import late are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from slime.arguments import Args
from slime.arguments.core.devices import visible_gpus
from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import format_of
from slime.catalog.engines import ENGINES
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
    """Report each package that is missing, with the command that installs it, or that cannot work here."""
    if sys.flags.optimize > 1:
        yield Finding("error", "transformers", f"{NEEDS_DOCSTRINGS}.")
    for flag, module, extra in _needed(args):
        if not is_installed(module):
            text = f"needs the package {module}, which is not installed: pip install 'slime-rl[{extra}]'"
            yield Finding("error", flag, text)
    row = None if args.custom_rm_path else find_reward(args.rm_type)
    protection = SANDBOXES[args.sandbox].protection
    if row is not None and row.runs_programs and protection is not None:
        try:
            yield Finding("note", "--sandbox", load_function(protection)())
        except RuntimeError as error:  # no sandbox of this kind starts here
            yield Finding("error", "--sandbox", f"{error}")


def check_engine_packages(args: Args) -> Iterator[Finding]:
    """Report what the own environment of the engines lacks, or has in another version than ours."""
    kind = ENGINES[args.rollout_engine]
    if not kind.own_python or args.debug_train_only or args.rollout_external_engine_addrs:
        return
    transport = None
    if not args.debug_rollout_only and args.lora_sync != "adapter":
        # Imported here: they load torch.
        from slime.weight_sync.base import Site
        from slime.weight_sync.transports import choose_transport

        site = Site(cuda=visible_gpus() > 0, colocated=args.colocate)
        wanted, mode = args.update_weight_transport, args.update_weight_mode
        transport = choose_transport(wanted, kind.dialect.transports, site, mode)
    for flag, text in load_function(f"{kind.folder}.environment.find_problems")(args, transport):
        yield Finding("error", flag, text)


def _needed(args: Args) -> Iterator[tuple[str, str, str | None]]:
    """Yield flag, module and the extra of slime that installs it."""
    for name in chosen_trackers(args):
        yield f"--use-{name}", TRACKERS[name].package, TRACKERS[name].extra
    trainer = BACKENDS[args.train_backend]
    if args.runtime == "ray":
        yield "--runtime ray", "ray", "ray"
    if args.lora_rank > 0 and trainer.trains_transformers_model:
        yield "--lora-rank", "peft", "lora"
    if args.update_weight_mode == "delta":
        yield "--update-weight-mode delta", "zstandard", "delta"
    files = [args.prompt_data, *(dataset.path for dataset in args.eval_datasets)]
    names = [name for file in files if file for name in ([file] if isinstance(file, str) else file)]
    for flag, row in (
        (f"--train-backend {args.train_backend}", trainer),
        (f"--rm-type {args.rm_type}", None if args.custom_rm_path else find_reward(args.rm_type)),
        (f"--sandbox {args.sandbox}", SANDBOXES[args.sandbox]),
        *(("--prompt-data", row) for row in {format_of(name.partition("@[")[0]) for name in names}),
    ):
        if row is not None and row.package is not None:
            yield flag, row.package.replace("-", "_"), row.extra
