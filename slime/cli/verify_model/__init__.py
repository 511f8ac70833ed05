"""`slime verify-model`: check that every trainer computes the same numbers as transformers."""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.catalog.engines import ENGINES
from slime.cli.main import user_errors

FAILED = 1  # exit code where numbers differ


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors():
        _check(options)
        if options.families:
            return _survey(options.families)
        with tempfile.TemporaryDirectory(prefix="slime-verify-") as folder:
            return verify(options, Path(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime verify-model",
        description="Check that every trainer computes the same numbers as transformers: FSDP, Megatron "
        "under each layout and optionally an engine, on a small random model of your architecture. Needs "
        "only config.json and a CPU.",
    )
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="folder (or hub id) with a config.json")
    parser.add_argument(
        "--families",
        nargs="+",
        metavar="TYPE",
        help="instead of one model, check these causal LM types of transformers (or `all`) with FSDP",
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="number of decoder layers of the small model [2]"
    )
    parser.add_argument(
        "--full-width", action="store_true", help="keep the numbers of heads and widths; slower"
    )
    parser.add_argument(
        "--layouts",
        metavar="LIST",
        help="Megatron layouts, such as tp2,pp2,tp2pp2 [all of two ranks, one of four]",
    )
    parser.add_argument("--engine", choices=tuple(ENGINES), help="also check an engine that serves the model")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference [1e-4]")
    parser.add_argument(
        "--deadline-s", type=float, default=300.0, help="time limit of one layout in seconds [300]"
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    if (options.hf_checkpoint is None) == (not options.families):
        raise ValueError("give either --hf-checkpoint DIR or --families TYPE ... (or all).")
    if options.layers < 1:
        raise ValueError(f"--layers is {options.layers}: at least one layer is needed.")
    if options.tolerance <= 0:
        raise ValueError(
            f"--tolerance is {options.tolerance}: use a value above 0; fp32 differs by 1e-6 or so."
        )


def _survey(words: Sequence[str]) -> int:
    # Imported here: it loads torch and transformers, which a wrong flag does not need.
    from slime.cli.verify_model.survey import DIFFERS, chosen_kinds, survey

    rows = survey(chosen_kinds(words), lambda line: print(line, flush=True))
    return FAILED if any(row.result == DIFFERS for row in rows) else 0


def verify(
    options: argparse.Namespace, folder: Path, *, before_build: Callable[[], None] | None = None
) -> int:
    """Print the table line by line and return the exit code. `before_build`: see `TrainerJob`."""
    # Imported here: torch and transformers take seconds to load, and a wrong flag needs neither.
    from slime.cli.verify_model import image_models, reference, shrink, trainer_job
    from slime.cli.verify_model.cases import documents
    from slime.cli.verify_model.compare import Table
    from slime.cli.verify_model.layouts import choose_targets

    reference.be_quiet()
    full = shrink.read_config(options.hf_checkpoint)
    if image_models.has_images(full):
        return _verify_images(options, full, folder)
    config = shrink.shrink(full, layers=options.layers, full_width=options.full_width)
    megatron = importlib.util.find_spec("megatron") is not None
    targets = choose_targets(options.layouts, experts=shrink.has_experts(config), megatron=megatron)
    renamed = shrink.type_for_megatron_alone(options.hf_checkpoint)
    if renamed is not None:
        targets = _only_megatron(options, targets, renamed)
    print(
        f"{options.hf_checkpoint}, as {shrink.describe(config)}; relative differences to transformers in fp32"
    )
    shrink.build(config, folder / "model", options.hf_checkpoint)
    trained = folder / "model"
    if renamed is not None:
        trained = folder / f"model-{renamed}"
        shrink.retype(folder / "model", trained, renamed)
        print(
            f"{renamed} is trained by Megatron alone; the reference is transformers' {config.model_type} of "
            "the same tensors"
        )
    expected = reference.compute(folder / "model", folder / "after", config.vocab_size)
    table = Table()
    for target in targets:
        job = trainer_job.TrainerJob(
            str(trained), target, str(folder / target.name.replace(" ", "-")), config.vocab_size, before_build
        )
        _check_target(options, job, expected, table)
    if options.engine:
        prompts = [tokens.tolist() for tokens in documents(config.vocab_size)["tokens"]]
        _check_served(options, prompts, folder, table)
    if not megatron:
        print("megatron-core is not installed: the Megatron trainer was not compared.")
    return _conclude(table)


def _verify_images(options: argparse.Namespace, config: Any, folder: Path) -> int:
    from slime.cli.verify_model import image_models

    if options.engine or options.layouts:
        raise ValueError(
            f"--engine and --layouts: a {config.model_type} is verified with images on the FSDP trainer "
            "alone; leave them out."
        )
    return FAILED if image_models.verify(options, config, folder) else 0


def _only_megatron(options: argparse.Namespace, targets: list[Any], kind: str) -> list[Any]:
    if options.engine:
        raise ValueError(
            f"--engine {options.engine}: no engine here serves a {kind} from its config alone; leave it out."
        )
    found = [target for target in targets if target.backend == "megatron"]
    if not found:
        raise ValueError(
            f"models of type {kind!r} are trained by Megatron alone: pip install 'slime[megatron]'."
        )
    return found


def _check_target(options: argparse.Namespace, job: Any, expected: Any, table: Any) -> None:
    from slime.cli.verify_model import trainer_job
    from slime.cli.verify_model.compare import compare

    target, started = job.target, time.monotonic()
    Path(job.folder).mkdir()
    try:
        found = trainer_job.run(job, options.deadline_s)
    except trainer_job.JobFailed as error:
        table.failed(target.name, target.ranks, time.monotonic() - started, str(error))
        return
    verdict = compare(expected, found, options.tolerance)
    table.compared(target.name, target.ranks, time.monotonic() - started, verdict)


def _check_served(options: argparse.Namespace, prompts: list[list[int]], folder: Path, table: Any) -> None:
    from slime.cli.verify_model.engine_check import check_engine
    from slime.utils.errors import RunStopped

    started = time.monotonic()
    name = f"{options.engine} engine"
    try:
        worst = check_engine(options.engine, folder / "model", prompts, folder, deadline_s=options.deadline_s)
    except RunStopped as error:
        table.failed(name, 1, time.monotonic() - started, str(error))
        return
    table.served(name, time.monotonic() - started, worst, options.tolerance)


def _conclude(table: Any) -> int:
    if not table.problems:
        print(f"all {table.rows} agree")
        return 0
    print()
    for name, problem in table.problems:
        print(f"{name} {'' if problem.startswith('did not') else 'diverges first at '}{problem}")
    return FAILED
