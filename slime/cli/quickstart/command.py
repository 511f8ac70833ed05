"""`slime quickstart`: make a model and its data, warm it up, train it by RL, and show whether it learned."""

import argparse
import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.cli.main import user_errors
from slime.cli.quickstart import smollm2, tiny
from slime.cli.quickstart.data import DataFiles, write_data
from slime.cli.quickstart.display import Phase, Screen
from slime.cli.quickstart.metrics import LOSS, REWARD
from slime.cli.quickstart.outcome import Outcome, draw_plot, read_outcome, summarise, write_summary
from slime.cli.quickstart.plan import RECIPES, Recipe, build_rl_argv, build_sft_argv, warmed_up
from slime.cli.quickstart.presets import PRESETS, describe
from slime.cli.train import load_args, run_loop
from slime.observability.logging_utils import configure_logger

RANDOM_REWARD = "random-reward"
OWNED = (
    "data",
    "model",
    "sft",
    "rl",
    "summary.json",
    "curve.png",
    "log.txt",
    "error.txt",
)  # what a new run in the same folder replaces


@dataclass(frozen=True, slots=True)
class Options:
    """The quick start's own flags; everything else on its command line belongs to the RL run."""

    model: str
    seed: int
    control: str | None
    advantage_estimator: str
    run_dir: Path
    num_rollout: int | None  # None: what the recipe says
    hf_checkpoint: str | None
    require_accuracy: float | None
    extra: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quick start; 0 when it ended well."""
    options = parse_options(argv)
    screen = Screen()
    clear(options.run_dir)
    with user_errors(options.run_dir / "error.txt"), logging_to(options.run_dir / "log.txt"):
        summary = run(options, screen)
    return verdict(summary, options, screen)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="slime quickstart",
        description=__doc__,
        epilog="Any other flag is passed on to the RL run (see: slime train --help) and wins over the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", choices=tuple(RECIPES), default="tiny", help="tiny: from scratch; smollm2: a real LLM"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, model and sampling (default 0)")
    parser.add_argument(
        "--advantage-estimator", default="grpo", metavar="NAME", help=f"with its preset: {', '.join(PRESETS)}"
    )
    parser.add_argument("--control", choices=(RANDOM_REWARD,), help="replace the reward by coin tosses")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/quickstart"), help="folder for everything it writes"
    )
    parser.add_argument(
        "--num-rollout", type=int, metavar="N", help="RL steps, where the recipe has too many or too few"
    )
    parser.add_argument("--hf-checkpoint", help="with --model smollm2: a local folder or hub name to use instead")
    parser.add_argument("--require-accuracy", type=float, metavar="X", help="fail unless held-out accuracy reaches X")
    known, extra = parser.parse_known_args(argv)
    if known.num_rollout is not None and known.num_rollout < 2:
        parser.error(f"--num-rollout is {known.num_rollout}: at least two steps are needed to tell before from after.")
    if known.hf_checkpoint and known.model == "tiny":
        parser.error("--hf-checkpoint goes with --model smollm2; the tiny model is always made here.")
    return Options(**vars(known), extra=tuple(extra))


def run(options: Options, screen: Screen) -> dict:
    """Everything from an empty folder to summary.json, whose content it returns."""
    started = time.monotonic()
    recipe = RECIPES[options.model]
    if options.num_rollout is not None:
        recipe = recipe.shortened_to(options.num_rollout)
    folder = options.run_dir
    warm_up = recipe.warm_up
    num_sft = warm_up.num_samples if warm_up else 0
    files = write_data(recipe.task, folder / "data", seed=options.seed, num_sft=num_sft, num_rl=recipe.num_rl_prompts)
    screen.say(f"Task: {recipe.task.question}")
    screen.say(describe(options.advantage_estimator, recipe.model))
    checkpoint = make_model(options, screen)
    # Read here once for its complaints: a misspelt flag must not surface only after the warm-up.
    load_args(rl_argv(recipe, options, files, checkpoint))
    if warm_up:
        checkpoint = run_warm_up(recipe, options, files, checkpoint, screen)
    args = load_args(rl_argv(recipe, options, files, checkpoint))
    phase = Phase("RL", args.num_rollout, REWARD, "reward")
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
    report(outcome, summary, recipe, options, screen)
    return summary


def clear(folder: Path) -> None:
    """Remove what an earlier quick start left in `folder`, and nothing else."""
    for name in OWNED:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log lines and progress bars of libraries go to a file: the screen is for the live line and the tables."""
    with path.open("w", encoding="utf-8", buffering=1) as log:
        try:
            with contextlib.redirect_stderr(log):
                yield
        finally:
            configure_logger()  # back to the real stderr: the handler must not outlive its file


def make_model(options: Options, screen: Screen) -> Path | str:
    """The checkpoint the quick start begins with."""
    if options.model == "tiny":
        return tiny.make_checkpoint(options.run_dir / "model", seed=options.seed)
    if options.hf_checkpoint:
        return options.hf_checkpoint
    screen.say(f"Model: SmolLM2-135M-Instruct from the package {smollm2.PACKAGE}; 4-bit weights, de-quantised.")
    return smollm2.ensure_checkpoint()


def rl_argv(recipe: Recipe, options: Options, files: DataFiles, checkpoint: Path | str) -> list[str]:
    return build_rl_argv(
        recipe,
        checkpoint=checkpoint,
        files=files,
        run_dir=options.run_dir / "rl",
        seed=options.seed,
        control=options.control == RANDOM_REWARD,
        estimator=options.advantage_estimator,
        extra=options.extra,
    )


def run_warm_up(recipe: Recipe, options: Options, files: DataFiles, checkpoint: Path, screen: Screen) -> Path:
    """SFT on the four habits; returns the folder of the warmed-up model."""
    folder = options.run_dir / "sft"
    argv = build_sft_argv(
        recipe, checkpoint=checkpoint, files=files, run_dir=folder, seed=options.seed, extra=options.extra
    )
    with screen.following(Phase("SFT", recipe.warm_up.num_steps, LOSS, "loss"), folder / "metrics.jsonl"):
        run_loop(load_args(argv))
    return warmed_up(recipe, folder)


def report(outcome: Outcome, summary: dict, recipe: Recipe, options: Options, screen: Screen) -> None:
    """Files first, so that they exist even where the screen fails."""
    folder = options.run_dir
    write_summary(summary, folder / "summary.json")
    title = f"slime quickstart: {recipe.task.name}, {recipe.model}, seed {options.seed}"
    written = "summary.json"
    try:
        draw_plot(outcome, folder / "curve.png", title=title)
        written += ", curve.png"
    except ImportError:
        screen.say("No plot: matplotlib is missing (pip install 'slime[plot]').")
    screen.show_outcome(outcome, recipe.task, num_held_out=summary["num_held_out"], control=options.control)
    screen.say(
        f"{summary['num_samples']} samples, {summary['weight_pushes']} weight pushes, {summary['wall_s']:.0f} s. "
        f"Written to {folder}: {written}."
    )


def verdict(summary: dict, options: Options, screen: Screen) -> int:
    """Exit code 1 where --require-accuracy was not met."""
    if options.require_accuracy is None or summary["accuracy_after"] >= options.require_accuracy:
        return 0
    screen.say(
        f"Held-out accuracy {summary['accuracy_after']:.3f} is below --require-accuracy {options.require_accuracy}."
    )
    return 1
