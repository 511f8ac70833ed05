"""`slime export`: write a trained model as a Hugging Face folder, with its LoRA adapter merged in."""

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cli.main import user_errors
from slime.utils.files.run_file import LAST_MODEL, RunRecord, read_run
from slime.utils.files.step_folders import step_folders

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER, ADAPTER_CONFIG = "adapter", "adapter_config.json"
# Settings of a run that decide which weights its checkpoints hold.
_OF_WEIGHTS = ("lora_rank", "lora_alpha", "lora_target_modules", "loss_type", "start_from")
_BUCKET_BYTES = 4 << 30  # about the size of one file


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    source, target = Path(options.source).expanduser(), Path(options.out).expanduser()
    with user_errors():
        if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"--out {target} exists already: give a new folder, or remove that one.")
        from slime.cluster.checkpoints.save_folder import refuse_unwritable  # --help does without it

        refuse_unwritable("--out", target)
        export(source, target, options)
    print(f"written: {target}")
    return 0


def export(source: Path, target: Path, options: argparse.Namespace) -> None:
    """Write the model of a run, a checkpoint or an adapter to `target`."""
    if not source.is_dir():
        raise ValueError(f"{source}: there is no such folder.")
    model = next((m for m in (source / LAST_MODEL, source) if (m / "config.json").is_file()), None)
    if (source / ADAPTER_CONFIG).is_file():
        merge_adapter(source, target, options.model)
    elif model is not None and options.step is None:
        _copy(model, target, adapter_only=options.adapter_only)
    else:
        _from_checkpoint(source, target, options)


def merge_adapter(adapter: Path, target: Path, model: str | None = None) -> None:
    """Write the model of a peft adapter with the adapter merged in. `model`: default: the one it names."""
    # Imported here: torch takes seconds to load, and errors in arguments are reported without it.
    import json

    from slime.backends.fsdp.hf_export import in_buckets
    from slime.backends.shared import hf_folder
    from slime.cli.one_rank import alone
    from slime.engines.embedded.adapter import scale_of
    from slime.utils.files.safetensors_files import all_files, read_tensors
    from slime.utils.models.hub_names import folder_of

    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = model or config["base_model_name_or_path"]
    if not (Path(base) / "config.json").is_file() and ("/" not in base or Path(base).is_absolute()):
        raise ValueError(f"{adapter} belongs to the model {base}, which is not there: name it with --model.")
    scale, factors = scale_of(config), dict(read_tensors(all_files(adapter)))

    def merged() -> Iterator[tuple[str, "Tensor"]]:
        for name, weight in read_tensors(all_files(folder_of(base))):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (factors.pop(f"{layer}.lora_{factor}.weight", None) for factor in "AB")
            if a is not None and b is not None:
                weight = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
            yield name, weight
        if factors:
            raise ValueError(f"{base} has no layer for {next(iter(factors))} of {adapter}: another model?")

    with alone():
        buckets = in_buckets(merged(), _BUCKET_BYTES, None)
        hf_folder.save(buckets, target, base, hf_folder.dtype_of(base))


def _copy(model: Path, target: Path, *, adapter_only: bool) -> None:
    """Copy a folder that `--save-hf` wrote: the merged model, or the adapter that lies in it."""
    if adapter_only and not (model / ADAPTER / ADAPTER_CONFIG).is_file():
        raise ValueError(f"--adapter-only: {model} has no adapter; only runs with --lora-rank have one.")
    staging = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    ignored = shutil.ignore_patterns(ADAPTER)
    shutil.copytree(model / ADAPTER if adapter_only else model, staging, ignore=ignored)
    if target.exists():
        target.rmdir()  # it is empty
    staging.rename(target)


def _from_checkpoint(source: Path, target: Path, options: argparse.Namespace) -> None:
    record = _run_of(source)
    settings = {} if record is None else record.last.values
    load = source
    if (
        record is not None
        and not step_folders(source)
        and record.last.checkpoints
        and read_run(source) is not None
    ):
        load = Path(record.last.checkpoints)
    if not step_folders(load) and not (load / "trainer").is_dir() and not (load / "trainer.json").is_file():
        raise ValueError(f"{source} holds no model and no checkpoint: give a run, or a folder of --save.")
    base = options.model or settings.get("hf_checkpoint")
    if base is None or not (Path(base) / "config.json").is_file():
        found = "which run wrote it is not known" if base is None else f"its model {base} is not there"
        raise ValueError(f"{source}: {found}; name the model that it was trained from with --model.")
    changes: dict[str, Any] = {name: settings[name] for name in _OF_WEIGHTS if name in settings}
    if options.model is not None:
        changes.pop("start_from", None)
    if options.adapter_only and not changes.get("lora_rank"):
        raise ValueError(f"--adapter-only: {source} has no adapter; only runs with --lora-rank have one.")
    # Imported here: torch takes seconds to load, and a wrong word does not need it.
    from slime.cli.convert.trainer_checkpoint import to_hf

    to_hf(
        Path(base),
        target,
        argparse.Namespace(load=str(load), ckpt_step=options.step, dtype=options.dtype),
        changes,
        adapter_only=options.adapter_only,
    )
    if not options.adapter_only:
        shutil.rmtree(target / ADAPTER, ignore_errors=True)  # it is merged


def _run_of(folder: Path) -> RunRecord | None:
    """Return the run that a folder belongs to: its own, or the one that has it as checkpoints."""
    parents = [folder, *folder.resolve().parents][:5]
    return next((record for record in map(read_run, parents) if record is not None), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime export", description=__doc__.partition(":")[2].strip())
    add = parser.add_argument
    add("source", metavar="RUN", help="folder of a run, one of its checkpoints, or a peft adapter")
    add("--out", required=True, metavar="FOLDER", help="new folder")
    add("--adapter-only", action="store_true", help="write the LoRA adapter alone, as peft reads it")
    add("--step", type=int, help="which checkpoint of the run, by its number [the last model]")
    add("--model", metavar="DIR", help="the model that training started from [the one that the run names]")
    add("--dtype", choices=("bfloat16", "float32"), help="dtype to write [that of the model]")
    return parser
