"""`slime convert`: weights between Hugging Face folders, trainer checkpoints and FP8, without a run."""

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND
from slime.cli.main import user_errors
from slime.utils.errors import RunStopped
from slime.utils.files.torch_dist_folder import is_megatron_folder


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors(), _naming_disk_errors(Path(options.save)):
        if options.what == "hf-to-fp8":
            # torch takes seconds to load, which a wrong flag should not cost.
            from slime.cli.convert.fp8_folder import convert

            convert(Path(options.hf_checkpoint), Path(options.save), options)
        else:
            from slime.cli.convert import megatron_checkpoint, trainer_checkpoint

            if options.what == "hf-to-dist":
                trainer_checkpoint.from_hf(options)
            elif options.what == "hf-to-torch-dist":
                megatron_checkpoint.from_hf(options)
            elif is_megatron_folder(options.load):
                megatron_checkpoint.to_hf(options)
            else:
                trainer_checkpoint.to_hf(options)
    print(f"written: {options.save}")
    return 0


@contextlib.contextmanager
def _naming_disk_errors(target: Path) -> Iterator[None]:
    """What the disk did to the new folder is one line, and the room of what was begun is given back."""
    try:
        yield
    except (RunStopped, ValueError):
        raise
    except Exception as error:
        # Here, because a wrong flag needs nothing of it.
        from slime.cluster.checkpoints.save_folder import disk_error

        cause = disk_error(error, next(path for path in target.absolute().parents if path.exists()))
        if cause is None:
            raise
        shutil.rmtree(target.with_name(f"{target.name}.tmp"), ignore_errors=True)
        file = getattr(error, "filename", None)
        at = f" at {file}" if file else ""
        raise RunStopped(f"--save {target} was not written: {cause}{at}.") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime convert", description=__doc__.partition(":")[2].strip())
    commands = parser.add_subparsers(
        dest="what", required=True, metavar="hf-to-dist | hf-to-torch-dist | dist-to-hf | hf-to-fp8"
    )
    _add_from_hf(commands)
    _add_torch_dist(commands)
    _add_to_hf(commands)
    _add_fp8(commands)
    return parser


def _add_from_hf(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "hf-to-dist",
        help="a Hugging Face model as a trainer checkpoint, for --load ... --finetune under any layout",
    )
    command.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="the model")
    command.add_argument(
        "--save", required=True, metavar="DIR", help="new folder, as --save of a run writes it"
    )
    command.add_argument(
        "--train-backend",
        choices=tuple(BACKENDS),
        default=DEFAULT_BACKEND,
        help=f"whose format [{DEFAULT_BACKEND}]",
    )


def _add_torch_dist(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "hf-to-torch-dist",
        help="a Hugging Face model as a checkpoint in Megatron's format, for --ref-load and --load",
    )
    command.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="the model")
    command.add_argument("--save", required=True, metavar="DIR", help="new folder: release/ and its tracker")


def _add_to_hf(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "dist-to-hf", help="a trainer checkpoint, or one in Megatron's torch_dist, as a Hugging Face model"
    )
    command.add_argument(
        "--load",
        "--input-dir",
        required=True,
        metavar="DIR",
        help="folder of --save, or one step_* in it; or DIR_torch_dist, or one iter_* in it",
    )
    command.add_argument("--ckpt-step", type=int, help="which of several checkpoints [the latest]")
    command.add_argument(
        "--hf-checkpoint",
        "--origin-hf-dir",
        required=True,
        metavar="DIR",
        help="model that the run started from",
    )
    command.add_argument("--save", "--output-dir", required=True, metavar="DIR", help="new folder")
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of the weights written [that of --hf-checkpoint]"
    )


def _add_fp8(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "hf-to-fp8", help="a Hugging Face model with its linear weights in FP8 blocks"
    )
    command.add_argument("--hf-checkpoint", "--model-dir", required=True, metavar="DIR", help="the model")
    command.add_argument("--save", "--save-dir", required=True, metavar="DIR", help="new folder")
    command.add_argument(
        "--block-size", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"), help="[128 128]"
    )
    command.add_argument("--scale-fmt", choices=("ue8m0",), help="ue8m0: factors are powers of two")
