"""`slime sweep`: run a command once for each combination of values and seeds, one after another.

The same command continues a sweep: finished runs are skipped, and an unfinished one resumes from its last
checkpoint; an unfinished evaluation starts again. Each run has a folder that is named by its values.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from slime.arguments.all_flags import all_specs
from slime.arguments.core.draft import ASYNCHRONOUS, SYNCHRONOUS
from slime.arguments.core.flag import name_of
from slime.arguments.parser import parse_args
from slime.catalog.loss_types import REWARD, curves_of
from slime.catalog.metrics import is_eval_score
from slime.cli.bounded_numbers import between
from slime.cli.main import COMMANDS, USER_MISTAKE, user_errors
from slime.cli.main import main as run_command
from slime.cli.tasks import TASKS, in_columns
from slime.observability.tracking import read_metrics
from slime.utils.errors import RunStopped
from slime.utils.files.run_file import LAST_MODEL, has_ended_well, read_run
from slime.utils.machine.own_command import as_typed

_RUNS = ("train", "train-async", *TASKS)
_FIRST_SEED = 1


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep: its values by name, and its seed."""

    values: tuple[tuple[str, str], ...]
    seed: int | None

    @property
    def label(self) -> str:
        return ",".join(f"{name}={Path(value).name or value}" for name, value in self.values) or "run"

    @property
    def folder(self) -> str:
        return self.label if self.seed is None else f"{self.label},seed={self.seed}"

    def words(self, command: str, folder: Path) -> list[str]:
        """Return the flags of this run, to append to the user's flags."""
        words = [word for name, value in self.values for word in _words(command, name, value)]
        words += [] if self.seed is None else ["--seed", str(self.seed)]
        words += ["--run-dir", str(folder)]
        if command not in TASKS:  # tasks save into their folder on their own
            words += ["--save", f"{folder}/checkpoints", "--save-hf", f"{folder}/{LAST_MODEL}-{{rollout_id}}"]
        return words


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:end])
    with user_errors():
        command, words = _split(given[end + 1 :])
        runs = list(_combinations(options.set, options.seeds, command))
        folders = [Path(options.out) / run.folder for run in runs]
        if len(set(folders)) < len(folders):
            raise ValueError("--set: two values would have the same folder; give each of them once.")
        whole = [[*words, *run.words(command, folder)] for run, folder in zip(runs, folders, strict=True)]
        for given in whole:  # a mistake in any combination is found before the first one runs
            _check(command, given)
    failed = []
    for number, (given, folder) in enumerate(zip(whole, folders, strict=True), start=1):
        print(f"sweep {number} of {len(runs)}: {folder}", flush=True)
        if has_ended_well(folder):
            print("  skipped: finished already")
            continue
        code = _run(command, given)
        if code > USER_MISTAKE:  # ended by a signal
            raise SystemExit(code)
        failed += [folder] if code else []
    print(_table(runs, folders, options.metric))
    print(f"curves: {as_typed('plot', *folders)}")
    with user_errors():
        if failed:
            raise RunStopped(f"{len(failed)} of {len(runs)} runs failed: {', '.join(map(str, failed))}")
    return 0


def _run(command: str, words: list[str]) -> int:
    try:
        return run_command([command, *words])
    except SystemExit as error:  # the message is on the screen
        return error.code if isinstance(error.code, int) else USER_MISTAKE


def _split(words: list[str]) -> tuple[str, list[str]]:
    """Return the command that is run, and its flags; without a command it is `train`."""
    if not words:
        raise ValueError(
            "nothing to run: write the command after --, such as `-- sft --model ... --data ...`"
        )
    if words[0].startswith("-"):
        return "train", words
    if words[0] not in _RUNS:
        what = "a command that starts no run" if words[0] in COMMANDS else "not a command"
        raise ValueError(f"{words[0]} is {what}: sweep runs {', '.join(_RUNS)}.")
    return words[0], words[1:]


def _combinations(sets: Sequence[str], seeds: int | None, command: str) -> Iterator[Combination]:
    names, choices = [], []
    for one in sets:
        name, equals, values = one.partition("=")
        name = name.removeprefix("--").replace("_", "-")
        if not equals or not all(values.split(",")):
            raise ValueError(f"--set {one}: write NAME=VALUE,VALUE, such as lr=1e-5,1e-6.")
        known = [spec_name.replace("_", "-") for spec_name in all_specs()]
        known += [
            option.removeprefix("--") for option in (TASKS[command].options if command in TASKS else ())
        ]
        if name not in known or name in ("run-dir", "out", "save", "save-hf"):
            near = get_close_matches(name, known, n=1)
            why = f"did you mean {near[0]}?" if near and near[0] != name else "it cannot be swept over."
            raise ValueError(f"--set {one}: no flag {name!r}; {why}")
        names.append(name)
        choices.append(values.split(","))
    numbers = [None] if seeds is None else range(_FIRST_SEED, _FIRST_SEED + seeds)
    for chosen in itertools.product(*choices):
        for seed in numbers:
            yield Combination(tuple(zip(names, chosen, strict=True)), seed)


def _words(command: str, name: str, value: str) -> list[str]:
    """Return the words that set a flag; a switch has no value."""
    spec = all_specs().get(name_of(name))
    if spec is None or spec.kind is not bool:
        return [f"--{name}", value]
    if value not in ("true", "false"):
        raise ValueError(f"--set {name}={value}: it is a switch; use true or false.")
    return [(spec.on_options if value == "true" else spec.off_options)[0]]


def _check(command: str, words: list[str]) -> None:
    """Raise ValueError where these flags cannot be read, or where all runs would continue one checkpoint."""
    if command in TASKS:
        task = TASKS[command]
        try:
            args = parse_args(task.flags_of(words), preset=task.preset)
        except ValueError as error:
            raise ValueError(task.speller(words)(str(error))) from None
    else:
        args = parse_args(words, training_loop=ASYNCHRONOUS if command == "train-async" else SYNCHRONOUS)
    is_given = args.sources.get("load", "").startswith(("command line", "file")) and not args.finetune
    if is_given and Path(args.run_dir) not in Path(args.load or "").parents:
        raise ValueError(
            f"--load {args.load}: all runs of a sweep would continue the same checkpoint; remove it, or "
            "add --finetune so that each run starts from its weights."
        )


def _table(runs: Sequence[Combination], folders: Sequence[Path], metric: str | None) -> str:
    """Return a line per combination: how many seeds have finished, and mean and deviation of a metric."""
    by_label: dict[str, list[Path]] = {}
    for run, folder in zip(runs, folders, strict=True):
        by_label.setdefault(run.label, []).append(folder)
    last = {folder: _last_values(folder) for folder in folders}
    name = metric or _choose_metric(folders, last.values())
    rows = [("run", "finished", name)]
    for label, group in by_label.items():
        values = [last[folder][name] for folder in group if name in last[folder]]
        band = f" ± {statistics.stdev(values):.2g}" if values[1:] else ""
        shown = f"{statistics.fmean(values):.4g}{band}" if values else "-"
        rows.append((label, f"{sum(map(has_ended_well, group))} of {len(group)}", shown))
    return in_columns(rows)


def _last_values(folder: Path) -> dict[str, float]:
    values: dict[str, float] = {}
    for row in read_metrics(folder) if read_run(folder) is not None else ():
        values |= {name: value for name, value in row.items() if type(value) in (int, float)}
    return values


def _choose_metric(folders: Iterable[Path], found: Iterable[dict[str, float]]) -> str:
    """Return the first score of an evaluation; of runs without one, their main curve."""
    names = sorted({name for values in found for name in values if is_eval_score(name)})
    runs = [run.last.values for folder in folders if (run := read_run(folder)) is not None]
    return [*names, *(curves_of(run)[0].metric for run in runs), REWARD.metric][0]


def _parser() -> argparse.ArgumentParser:
    usage = "slime sweep [--set NAME=VALUE,VALUE ...] [--seeds N] [--out DIR] -- [sft|dpo|...|train] FLAGS"
    parser = argparse.ArgumentParser("slime sweep", usage=usage, description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="values of a flag; may repeat, which runs all combinations",
    )
    add(
        "--seeds",
        type=between(1, 1000, int),
        metavar="N",
        help="run each combination with the seeds 1 to N",
    )
    add("--out", default="runs/sweep", metavar="DIR", help="folder of the runs [runs/sweep]")
    add(
        "--metric", metavar="NAME", help="metric of the table [an evaluation's score, the reward or the loss]"
    )
    return parser
