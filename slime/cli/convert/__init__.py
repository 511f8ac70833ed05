"""`slime convert`: convert weights between Hugging Face folders, trainer checkpoints, FP8 and INT4."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND
from slime.cli.main import user_errors
from slime.utils.files.torch_dist_folder import is_megatron_folder

Add = Callable[..., Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    source, target = Path(options.hf_checkpoint), Path(options.save)
    with user_errors():
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"--save {target} exists already: give a new folder, or remove that one.")
        if not (source / "config.json").is_file():
            raise ValueError(
                f"--hf-checkpoint {source}: no config.json there, so it is not a Hugging Face model folder."
            )
        # Imported here: torch takes seconds to load, and errors in flags are reported without it.
        from slime.cli.convert import fp8_folder, megatron_checkpoint, trainer_checkpoint

        if options.what == "hf-to-fp8":
            fp8_folder.quantize(source, target, options)
        elif options.what == "hf-to-int4":
            fp8_folder.quantize_int4(source, target)
        elif options.what == "fp8-to-bf16":
            fp8_folder.dequantize(source, target)
        elif options.what == "hf-to-dist":
            trainer_checkpoint.from_hf(source, target, options)
        elif options.what == "hf-to-torch-dist":
            megatron_checkpoint.from_hf(source, target)
        elif is_megatron_folder(options.load):
            megatron_checkpoint.to_hf(source, target, options)
        else:
            trainer_checkpoint.to_hf(source, target, options)
    print(f"written: {options.save}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime convert", description=__doc__.partition(":")[2].strip())
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def command(name: str, what: str, model: str, *other_names: tuple[str, ...]) -> Add:
        """Add a subcommand with --hf-checkpoint and --save; return its `add_argument`."""
        add = commands.add_parser(name, help=what).add_argument
        model_names, save_names = other_names or ((), ())
        add("--hf-checkpoint", *model_names, required=True, metavar="DIR", help=model)
        add("--save", *save_names, required=True, metavar="DIR", help="new folder")
        return add

    dist = "convert a Hugging Face model to a trainer checkpoint, for --load ... --finetune under any layout"
    add = command("hf-to-dist", dist, "the model")
    backends = f"format of this trainer [{DEFAULT_BACKEND}]"
    add("--train-backend", choices=tuple(BACKENDS), default=DEFAULT_BACKEND, help=backends)

    torch_dist = "convert a Hugging Face model to Megatron's torch_dist format, for --ref-load and --load"
    command("hf-to-torch-dist", torch_dist, "the model")

    to_hf = "convert a trainer checkpoint, or one in Megatron's torch_dist format, to a Hugging Face model"
    add = command(
        "dist-to-hf", to_hf, "model that the run started from", ("--origin-hf-dir",), ("--output-dir",)
    )
    source = "folder of --save, or one step_* in it; or DIR_torch_dist, or one iter_* in it"
    add("--load", "--input-dir", required=True, metavar="DIR", help=source)
    add("--ckpt-step", type=int, help="which of several checkpoints [the latest]")
    add("--dtype", choices=("bfloat16", "float32"), help="dtype to write [that of --hf-checkpoint]")

    fp8 = "convert a Hugging Face model to one with FP8 blocks in its linear layers"
    add = command("hf-to-fp8", fp8, "the model", ("--model-dir",), ("--save-dir",))
    add("--block-size", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"), help="[128 128]")
    add("--scale-fmt", choices=("ue8m0",), help="ue8m0: scales are powers of two")

    int4 = "convert a Hugging Face model to INT4 in groups of 32: its experts, else its linear layers"
    command("hf-to-int4", int4, "the model", ("--model-dir",), ("--save-dir",))

    command(
        "fp8-to-bf16", "convert a Hugging Face model in FP8 blocks (DeepSeek-V3) to bf16", "the FP8 model"
    )
    return parser
