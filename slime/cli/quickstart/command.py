"""`slime quickstart`: make a model and its data, warm it up, train it by RL, and show whether it learned."""

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.arguments.core.draft import ASYNCHRONOUS
from slime.arguments.parser import parse_args
from slime.catalog.loss_types import LOSS, REWARD
from slime.cli.main import user_errors
from slime.cli.quickstart import smollm2, tiny
from slime.cli.quickstart.display import Screen
from slime.cli.quickstart.outcome import (
    QuickstartOutcome,
    read_outcome,
    summarise,
    write_summary,
)
from slime.cli.quickstart.tasks import DataFiles, write_data
from slime.cli.quickstart.two_runs import (
    PRESETS,
    RECIPES,
    Recipe,
    build_rl_argv,
    build_sft_argv,
    describe,
    write_run_file,
)
from slime.cli.train import run_loop
from slime.cli.train_async import run_loop as run_overlapped
from slime.observability.terminal.progress import Progress
from slime.preflight.packages import NEEDS_DOCSTRINGS
from slime.utils.files.folder_lock import FolderLock
from slime.utils.machine.own_command import as_typed
from slime.utils.machine.warm_start import warm_starts

RANDOM_REWARD = "random-reward"
# What a quick start writes.
OWNED = ("data", "model", "sft", "rl", "summary.json", "curve.png", "log.txt", "error.txt")
MADE_BY_ONE = ("log.txt", "summary.json")  # the first and the last file that a quick start writes
# Modules that trainers and engines of both runs import first.
_OF_CHILDREN = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "slime.backends.fsdp.backend",
    "slime.cluster.training.train_actor",
    "slime.engines.embedded.http_server",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quick start and return its exit code."""
    options = parse_options(argv)
    screen = Screen(quiet="--quiet" in options.extra)
    with contextlib.ExitStack() as stack:
        with user_errors():
            if sys.flags.optimize > 1:
                raise ValueError(f"slime quickstart: {NEEDS_DOCSTRINGS}.")
            made = stack.enter_context(rehearsed(options, screen))
            earlier = stack.enter_context(opened(options.run_dir))
        if earlier is not None:
            screen.say(f"An earlier quick start in {options.run_dir} was moved to {earlier}.")
        with user_errors(options.run_dir / "error.txt"), screen.logging_to(options.run_dir / "log.txt"):
            summary = run(options, screen, made)
    return verdict(summary, options, screen)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the quick start's own flags and its `recipe`. `extra`: all other flags, for the RL run."""
    parser = argparse.ArgumentParser(
        prog="slime quickstart",
        description=__doc__,
        epilog="Any other flag is passed on to the RL run (see: slime train --help), "
        "and wins over the recipe.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", choices=tuple(RECIPES), default="tiny", help="tiny: from scratch; smollm2: a real LLM")
    add("--seed", type=int, default=0, help="seed of data, model and sampling (default 0)")
    presets = f"default grpo; presets exist for {', '.join(PRESETS)}"
    add("--advantage-estimator", default="grpo", metavar="NAME", help=presets)
    add("--control", choices=(RANDOM_REWARD,), help="replace the reward by coin tosses")
    add("--run-dir", type=Path, default=Path("runs/quickstart"), help="folder for everything it writes")
    add("--num-rollout", type=int, metavar="N", help="number of RL steps (default: the recipe's)")
    add("--hf-checkpoint", help="with --model smollm2: use this local folder or hub name")
    accuracy = "fail unless held-out accuracy reaches X of 1"
    add("--require-accuracy", type=float, metavar="X", help=accuracy)
    known, extra = parser.parse_known_args(argv)
    if known.num_rollout is not None and known.num_rollout < 2:
        parser.error(
            f"--num-rollout is {known.num_rollout}: use at least 2 steps to compare before and after."
        )
    if known.require_accuracy is not None and not 0 <= known.require_accuracy <= 1:
        parser.error(
            f"--require-accuracy is {known.require_accuracy:g}, which no run reaches; write 0.9 for 90%."
        )
    if known.hf_checkpoint and known.model == "tiny":
        parser.error("--hf-checkpoint goes with --model smollm2; the tiny model is always made here.")
    recipe = RECIPES[known.model]
    known.recipe = recipe if known.num_rollout is None else recipe.shortened_to(known.num_rollout)
    known.extra = tuple(extra)
    return known


@contextlib.contextmanager
def rehearsed(options: argparse.Namespace, screen: Screen) -> Iterator[Path | str]:
    """Run everything up to the first training step in a temporary folder; yield the model made for it.

    Errors are raised here, before an earlier quick start is moved and before the warm-up takes its time.
    """
    recipe = options.recipe
    # The first chunk of the warm-up is enough: no flag changes the conversations.
    short = replace(recipe, warm_up=recipe.warm_up and replace(recipe.warm_up, num_chunks=1))
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-quickstart-"))
        scratch = argparse.Namespace(**{**vars(options), "run_dir": Path(name)})
        with screen.logging_to(scratch.run_dir / "log.txt"):
            if options.model != "tiny" and not options.hf_checkpoint:
                model = f"SmolLM2-135M-Instruct from the package {smollm2.PACKAGE}"
                screen.say(f"Model: {model}; 4-bit, de-quantised.")
            files = write_files(short, scratch)
            # Checked before torch is loaded and a model is made; --print-config ends here.
            with naming(options.run_dir, in_place_of=name):
                parse_args(rl_argv(scratch, files, options.hf_checkpoint or stand_in(scratch.run_dir)))
        stack.enter_context(warm_starts(_OF_CHILDREN))
        with screen.logging_to(scratch.run_dir / "log.txt"):
            # Imported here: it loads torch, which --help does not need.
            from slime.preflight.all_checks import preflight

            checkpoint = make_model(scratch)
            args = parse_args(rl_argv(scratch, files, checkpoint))
            preflight(args).raise_errors()
            if recipe.warm_up:
                warm_up = sft_argv(scratch, files, checkpoint)
                preflight(parse_args(warm_up, training_loop=ASYNCHRONOUS), overlapped=True).raise_errors()
        check_evaluations(args)
        derived = args.sources["dtype"].removeprefix("derived: ")
        why = "set by the recipe" if args.dtype in recipe.precision else derived
        screen.say(f"Precision: {args.dtype} ({why}).")
        for warning in args.warnings:
            screen.say(f"Note: {warning}")
        yield checkpoint


def stand_in(folder: Path) -> Path:
    """Return a placeholder for the model before it is made."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder / "model"


@contextlib.contextmanager
def naming(folder: Path, *, in_place_of: str) -> Iterator[None]:
    """Print at the end what the block printed, with one path replaced by another."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(printed.getvalue().replace(in_place_of, str(folder)), end="")


def check_evaluations(args: Args) -> None:
    """Require evaluations before and after training: the quick start compares them."""
    if args.skip_eval_before_train:
        raise ValueError("--skip-eval-before-train: a quick start compares before with after; leave it out.")
    assert args.num_rollout is not None, "every recipe sets the number of steps"
    if args.eval_interval is None or args.eval_interval > args.num_rollout:
        raise ValueError(
            f"--eval-interval is {args.eval_interval}, but the run has {args.num_rollout} steps: a quick "
            "start compares before with after; use at most that."
        )


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path | None]:
    """Lock the folder for this quick start; yield the folder that an earlier one was moved to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--run-dir {folder} cannot be written to: {error.strerror}.") from None
    lock = FolderLock(folder, "--run-dir")
    try:
        yield set_aside(folder)
    finally:
        lock.release()


def set_aside(folder: Path) -> Path | None:
    """Move an earlier quick start aside and return its new folder; None if there was none.

    Names such as `data` are common, so a folder that no quick start made is refused, not moved.
    """
    found = [folder / name for name in OWNED if (folder / name).exists()]
    if not found:
        return None
    if not any((folder / name).exists() for name in MADE_BY_ONE):
        name = f"{found[0].name}/" if found[0].is_dir() else found[0].name
        raise ValueError(f"--run-dir {folder} holds {name}, which no quick start made; give another folder.")
    taken = [int(path.name) for path in folder.glob("earlier/*") if path.name.isdigit()]
    target = folder / "earlier" / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    return target


def write_files(recipe: Recipe, options: argparse.Namespace) -> DataFiles:
    num_sft = recipe.warm_up.num_samples if recipe.warm_up else 0
    folder, seed = options.run_dir / "data", options.seed
    return write_data(recipe.task, folder, seed=seed, num_sft=num_sft, num_rl=recipe.num_rl_prompts)


def run(options: argparse.Namespace, screen: Screen, made: Path | str) -> dict[str, Any]:
    """Train and report in an empty folder; return the content of summary.json. `made`: the model."""
    started = time.monotonic()
    recipe, folder = options.recipe, options.run_dir
    screen.say(f"Task: {recipe.task.question}")
    screen.say(describe(options.advantage_estimator, recipe.model))
    checkpoint = Path(shutil.move(made, folder / "model")) if options.model == "tiny" else made
    files = write_files(recipe, options)
    if recipe.warm_up:
        # The asynchronous loop suits SFT: the next batch does not depend on the weights, so it is prepared
        # while this one is trained.
        args = parse_args(sft_argv(options, files, checkpoint), training_loop=ASYNCHRONOUS)
        phase = Progress(recipe.warm_up.num_steps, "SFT", LOSS, done_key=LOSS.metric)
        with screen.following(phase, folder / "sft" / "metrics.jsonl"):
            run_overlapped(args)
        checkpoint = folder / "sft" / f"hf-{recipe.warm_up.num_chunks - 1}"
    args = parse_args(rl_argv(options, files, checkpoint))
    assert args.num_rollout is not None, "every recipe sets the number of steps"
    phase = Progress(args.num_rollout, "RL", REWARD, done_key=REWARD.metric)
    with screen.following(phase, folder / "rl" / "metrics.jsonl"):
        run_loop(args)
    outcome = read_outcome(folder / "rl", recipe.task.draw_held_out())
    summary = summarise(
        outcome,
        recipe,
        files,
        seed=options.seed,
        control=options.control,
        estimator=args.advantage_estimator,
        wall_s=time.monotonic() - started,
    )
    write_run_file(args, folder / "run.yaml")
    report(outcome, summary, options, screen)
    return summary


def make_model(options: argparse.Namespace) -> Path | str:
    """Return the checkpoint that the quick start starts from."""
    if options.model == "tiny":
        return tiny.make_checkpoint(options.run_dir / "model", seed=options.seed)
    return options.hf_checkpoint or smollm2.ensure_checkpoint()


def rl_argv(options: argparse.Namespace, files: DataFiles, checkpoint: Path | str) -> list[str]:
    return build_rl_argv(
        options.recipe,
        checkpoint=checkpoint,
        files=files,
        run_dir=options.run_dir / "rl",
        seed=options.seed,
        control=options.control == RANDOM_REWARD,
        estimator=options.advantage_estimator,
        extra=options.extra,
    )


def sft_argv(options: argparse.Namespace, files: DataFiles, checkpoint: Path | str) -> list[str]:
    run_dir, seed, extra = options.run_dir / "sft", options.seed, options.extra
    return build_sft_argv(
        options.recipe, checkpoint=checkpoint, files=files, run_dir=run_dir, seed=seed, extra=extra
    )


def report(
    outcome: QuickstartOutcome, summary: dict[str, Any], options: argparse.Namespace, screen: Screen
) -> None:
    """Write the summary first, so that it exists even if the terminal fails."""
    folder, task = options.run_dir, options.recipe.task
    write_summary(summary, folder / "summary.json")
    screen.show_outcome(outcome, task, num_held_out=summary["num_held_out"], control=options.control)
    screen.say(
        f"{summary['num_samples']} samples, {summary['weight_pushes']} weight pushes, "
        f"{summary['wall_s']:.0f} s. Written to {folder}: summary.json, run.yaml."
    )
    screen.say(f"Open the dashboard: {as_typed('dashboard', folder / 'rl')}")
    screen.say(f"Next, edit {folder / 'run.yaml'} (model, prompts, reward) and run it:")
    screen.say(f"    {as_typed('train', '--config', folder / 'run.yaml')}")


def verdict(summary: dict[str, Any], options: argparse.Namespace, screen: Screen) -> int:
    """Return exit code 1 if --require-accuracy was not met."""
    if options.require_accuracy is None or summary["accuracy_after"] >= options.require_accuracy:
        return 0
    screen.say(
        f"Held-out accuracy {summary['accuracy_after']:.3f} is below --require-accuracy "
        f"{options.require_accuracy}."
    )
    return 1
