"""`slime verify-model`: check that every trainer computes the same numbers as transformers."""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
        description="Check that every trainer computes the same numbers as transformers: FSDP, and Megatron "
        "under each layout, on a small random model of your architecture. Needs only config.json and a CPU.",
    )
    add = parser.add_argument
    add("--hf-checkpoint", metavar="DIR", help="folder (or hub id) with a config.json")
    families = "instead of one model, check these causal LM types of transformers (or `all`) with FSDP"
    add("--families", nargs="+", metavar="TYPE", help=families)
    add("--layers", type=int, default=2, help="number of decoder layers of the small model [2]")
    add("--full-width", action="store_true", help="keep the numbers of heads and widths; slower")
    layouts = "Megatron layouts, such as tp2,pp2,tp2pp2 [all of two ranks, one of four]"
    add("--layouts", metavar="LIST", help=layouts)
    add("--tolerance", type=float, default=1e-4, help="largest relative difference [1e-4]")
    add("--deadline-s", type=float, default=300.0, help="time limit of one layout in seconds [300]")
    return parser


def verify(
    options: argparse.Namespace, folder: Path, *, before_build: Callable[[], None] | None = None
) -> int:
    """Print the table line by line and return the exit code. `before_build`: see `TrainerJob`."""
    # Imported here: torch and transformers take seconds to load, and a wrong flag needs neither.
    from slime.algorithms.vision.towers import family_of
    from slime.cli.verify_model import reference, shrink, trainer_job
    from slime.cli.verify_model.compare import Table
    from slime.cli.verify_model.layouts import choose_targets

    reference.be_quiet()
    full = shrink.read_config(options.hf_checkpoint)
    if family_of(full) is not None:
        raise ValueError(
            f"--hf-checkpoint {options.hf_checkpoint} is a {full.model_type}: this command compares text "
            "models; families with images are compared with transformers by slime's tests (docs/images.md)."
        )
    config = shrink.shrink(full, layers=options.layers, full_width=options.full_width)
    megatron = importlib.util.find_spec("megatron") is not None
    targets = choose_targets(options.layouts, experts=shrink.has_experts(config), megatron=megatron)
    name = f"{options.hf_checkpoint}, as {shrink.describe(config)}"
    print(f"{name}; relative differences to transformers in fp32")
    model = folder / "model"
    shrink.build(config, model, options.hf_checkpoint)
    expected = reference.compute(model, folder / "after", config.vocab_size)
    table = Table(options.tolerance)
    for target in targets:
        place = str(folder / target.name.replace(" ", "-"))
        job = trainer_job.TrainerJob(str(model), target, place, config.vocab_size, before_build)
        started = time.monotonic()
        try:
            found = trainer_job.run(job, options.deadline_s)
        except trainer_job.JobFailed as error:
            table.failed(target.name, target.ranks, started, error)
        else:
            table.compared(target.name, target.ranks, started, expected, found)
    if not megatron:
        print("megatron-core is not installed: the Megatron trainer was not compared.")
    print("\n".join(["", *table.problems]) if table.problems else f"all {table.rows} agree")
    return FAILED if table.problems else 0
