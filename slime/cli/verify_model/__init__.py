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
        if (options.hf_checkpoint is None) == (not options.families):
            raise ValueError("give either --hf-checkpoint DIR or --families TYPE ... (or all).")
        if options.layers < 1 or options.tolerance <= 0:
            raise ValueError(
                f"--layers is {options.layers} and --tolerance {options.tolerance}: use at least one layer, "
                "and a tolerance above 0; fp32 differs by 1e-6 or so."
            )
        if options.families:
            # Imported here: it loads torch and transformers, which a wrong flag does not need.
            from slime.cli.verify_model.survey import DIFFERS, chosen_kinds, survey

            rows = survey(chosen_kinds(options.families))
            return FAILED if any(row.result == DIFFERS for row in rows) else 0
        with tempfile.TemporaryDirectory(prefix="slime-verify-") as folder:
            return verify(options, Path(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime verify-model",
        description="Check that every trainer computes the same numbers as transformers: FSDP, Megatron "
        "under each layout and optionally an engine, on a small random model of your architecture. Needs "
        "only config.json and a CPU.",
    )
    add = parser.add_argument
    add("--hf-checkpoint", metavar="DIR", help="folder (or hub id) with a config.json")
    families = "instead of one model, check these causal LM types of transformers (or `all`) with FSDP"
    add("--families", nargs="+", metavar="TYPE", help=families)
    add("--layers", type=int, default=2, help="number of decoder layers of the small model [2]")
    add("--full-width", action="store_true", help="keep the numbers of heads and widths; slower")
    layouts = "Megatron layouts, such as tp2,pp2,tp2pp2 [all of two ranks, one of four]"
    add("--layouts", metavar="LIST", help=layouts)
    add("--engine", choices=tuple(ENGINES), help="also check an engine that serves the model")
    add("--tolerance", type=float, default=1e-4, help="largest relative difference [1e-4]")
    add("--deadline-s", type=float, default=300.0, help="time limit of one layout in seconds [300]")
    return parser


def verify(
    options: argparse.Namespace, folder: Path, *, before_build: Callable[[], None] | None = None
) -> int:
    """Print the table line by line and return the exit code. `before_build`: see `TrainerJob`."""
    # Imported here: torch and transformers take seconds to load, and a wrong flag needs neither.
    from slime.cli.verify_model import image_models, reference, shrink, trainer_job
    from slime.cli.verify_model.compare import Table
    from slime.cli.verify_model.layouts import choose_targets

    reference.be_quiet()
    full = shrink.read_config(options.hf_checkpoint)
    if image_models.has_images(full):
        if options.engine or options.layouts:
            raise ValueError(
                f"--engine and --layouts: a {full.model_type} is verified with images on the FSDP trainer "
                "alone; leave them out."
            )
        return FAILED if image_models.verify(options, full, folder) else 0
    config = shrink.shrink(full, layers=options.layers, full_width=options.full_width)
    megatron = importlib.util.find_spec("megatron") is not None
    targets = choose_targets(options.layouts, experts=shrink.has_experts(config), megatron=megatron)
    renamed = shrink.type_for_megatron_alone(options.hf_checkpoint)
    if renamed is not None:
        targets = _only_megatron(options, targets, renamed)
    name = f"{options.hf_checkpoint}, as {shrink.describe(config)}"
    print(f"{name}; relative differences to transformers in fp32")
    model = trained = folder / "model"
    shrink.build(config, model, options.hf_checkpoint)
    if renamed is not None:
        trained = folder / f"model-{renamed}"
        shrink.retype(model, trained, renamed)
        print(
            f"{renamed} is trained by Megatron alone; the reference is transformers' {config.model_type} of"
        )
        print("the same tensors")
    expected = reference.compute(model, folder / "after", config.vocab_size)
    table = Table(options.tolerance)
    for target in targets:
        place = str(folder / target.name.replace(" ", "-"))
        job = trainer_job.TrainerJob(str(trained), target, place, config.vocab_size, before_build)
        started = time.monotonic()
        try:
            found = trainer_job.run(job, options.deadline_s)
        except trainer_job.JobFailed as error:
            table.failed(target.name, target.ranks, started, error)
        else:
            table.compared(target.name, target.ranks, started, expected, found)
    if options.engine:
        _check_engine(options, model, config.vocab_size, table)
    if not megatron:
        print("megatron-core is not installed: the Megatron trainer was not compared.")
    print("\n".join(["", *table.problems]) if table.problems else f"all {table.rows} agree")
    return FAILED if table.problems else 0


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


def _check_engine(options: argparse.Namespace, model: Path, vocabulary: int, table: Any) -> None:
    from slime.cli.verify_model.cases import documents
    from slime.cli.verify_model.engine_check import check_engine
    from slime.utils.errors import RunStopped

    prompts = [tokens.tolist() for tokens in documents(vocabulary)["tokens"]]
    name, started = f"{options.engine} engine", time.monotonic()
    try:
        worst = check_engine(options.engine, model, prompts, model.parent, deadline_s=options.deadline_s)
    except RunStopped as error:
        table.failed(name, 1, started, error)
    else:
        table.served(name, started, worst)
