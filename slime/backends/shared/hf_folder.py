"""Writes a folder for `from_pretrained` from streams of weight buckets, by all ranks together, atomically."""

import itertools
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slime.backends.base import Bucket
from slime.utils.files.safetensors_files import (
    SINGLE,
    all_files,
    read_tensors,
    tensor_names,
    write_index,
    write_tensors,
)
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, dequantize_blocks
from slime.utils.models.hub_names import folder_of
from slime.utils.models.model_config import block_size_of

logger = logging.getLogger(__name__)

# Files of the tokenizer, and of a model's own code, whose modules its configuration names.
_BESIDE_WEIGHTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*", "*processor_config.json", "*.py"),
)
# Names of tensors that a trainer did not build: MTP heads (multi-token prediction), vision, audio.
_UNBUILT = re.compile(r"(^|\.)(mtp|nextn|visual|vision|audio|embed_vision|embed_audio|multi_modal)\w*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def dtype_of(source: str) -> torch.dtype:
    """Return the dtype in which the model of a folder or hub id was saved."""
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source).dtype or torch.float32


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a folder that a rank writes: each `count`-th bucket of its pipeline stage, from `index`."""

    stage: int = 0
    index: int = 0
    count: int = 1


WHOLE = Share()


class Written(NamedTuple):
    """One file of weights: its place among those of the folder, and the bytes of each tensor."""

    place: tuple[int, int]  # stage and bucket
    sizes: dict[str, int]

    @property
    def part(self) -> str:
        return "part-{}-{}".format(*self.place)


def save(
    buckets: Iterator[Bucket],
    path: Path,
    source: str,
    dtype: torch.dtype,
    share: Share = WHOLE,
    *,
    scalar: bool = False,
) -> None:
    """Write config, generation config, tokenizer and safetensors next to `path`, then rename.

    `source` is the HF model the weights were trained from. All ranks walk through the buckets of their stage
    and write their share of them, side by side; rank 0 writes the rest. With `scalar` the weights are those
    of a sequence classification with one label: a reward model.
    """
    temporary = path.with_name(path.name + ".tmp")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _write_share(buckets, temporary, share))
    if (failure := next((one for one in outcomes if isinstance(one, Exception)), None)) is not None:
        raise failure
    if rank == 0:
        _complete(temporary, sorted(itertools.chain(*outcomes)), source, dtype, scalar)
        _replace(temporary, path)
    dist.barrier()


def _write_share(buckets: Iterator[Bucket], folder: Path, share: Share) -> list[Written] | Exception:
    """Write this rank's buckets while the next ones are gathered; return its files, or why one failed.

    Errors are returned, because the other ranks continue to gather buckets with this one.
    """
    writes: list[tuple[Written, Future[None]]] = []
    with ThreadPoolExecutor(1) as writer:
        for number, bucket in enumerate(buckets):
            if number % share.count != share.index:
                continue
            if writes:
                wait([writes[-1][1]])  # host memory holds one bucket at a time
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            written = Written((share.stage, number), sizes)
            writes.append((written, writer.submit(write_tensors, folder / written.part, tensors)))
    failures = (write.exception() for _, write in writes)
    failure = next((error for error in failures if isinstance(error, Exception)), None)
    return [written for written, _ in writes] if failure is None else failure


def _complete(folder: Path, files: list[Written], source: str, dtype: torch.dtype, scalar: bool) -> None:
    """Add what no rank built, name the files of weights, and write config and tokenizer."""
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(source)
    names = (name for file in files for name in file.sizes)
    if not scalar and (heads := unbuilt_heads(source, config, names, dtype)):
        files.append(Written((files[-1].place[0] + 1, 0), {name: tensor.nbytes for name, tensor in heads}))
        write_tensors(folder / files[-1].part, dict(heads))
    _name_files(folder, files)
    config.dtype = dtype
    # The saved weights are never quantised, even if the source is.
    config.__dict__.pop("quantization_config", None)
    if scalar:
        config.num_labels = 1
        config.architectures = [
            name.replace("ForCausalLM", "ForSequenceClassification") for name in config.architectures
        ]
    config.save_pretrained(folder)
    if (Path(source) / "generation_config.json").is_file() or not Path(source).is_dir():
        GenerationConfig.from_pretrained(source).save_pretrained(folder)
    _copy_other_files(source, folder)


def _name_files(folder: Path, files: list[Written]) -> None:
    """Name the files: one is model.safetensors; several get numbers and an index."""
    if len(files) == 1:
        (folder / files[0].part).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / file.part).rename(folder / name)
        weight_map.update(dict.fromkeys(file.sizes, name))
    total = sum(sum(file.sizes.values()) for file in files)
    write_index(folder, weight_map, total)


def _copy_other_files(source: str, folder: Path) -> None:
    if Path(source).is_dir():
        for file in (file for pattern in _BESIDE_WEIGHTS for file in Path(source).glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        return
    # A hub id: transformers finds the files in its cache.
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an older folder there moves aside first, to a free name, and is removed."""
    if not path.exists():
        new.rename(path)
        return
    old = next(
        name for i in itertools.count(1) if not (name := path.with_name(f"{path.name}.old-{i}")).exists()
    )
    path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def is_mtp_head(name: str, num_layers: int) -> bool:
    """Return whether a hub tensor belongs to an MTP head, by its name or as a layer after the last one."""
    layer = _LAYER.search(name)
    return bool(_UNBUILT.search(name)) or (layer is not None and int(layer[2]) >= num_layers)


def unbuilt_heads(source: str, config: Any, written: Iterable[str], dtype: torch.dtype) -> Bucket:
    """Yield tensors of unbuilt parts of `source` that were not `written`, as `dtype`.

    Without them the config of a saved folder would name tensors that the folder does not contain.
    """
    num_layers, written = config.get_text_config().num_hidden_layers, set(written)
    folder = folder_of(source)
    files, block = all_files(folder), block_size_of(folder)
    names = {name for file in files for name in tensor_names(file) if is_mtp_head(name, num_layers)}
    # Experts of a head that trained were written one by one, also where the source has one tensor of all.
    apart = {place for place, found, _ in (name.partition(".experts.") for name in written) if found}
    missing = {name for name in names - written if name.partition(".experts.")[0] not in apart}
    tensors = dict(read_tensors(files, missing))
    found: Bucket = []
    for name, tensor in tensors.items():
        if block is not None and name.endswith(SCALE_SUFFIX):
            continue
        if block is not None and (scale := tensors.get(name + SCALE_SUFFIX)) is not None:
            tensor = dequantize_blocks(tensor, scale, block, dtype)
        # Hub checkpoints keep this bias in fp32, because its last bits decide the choice of experts.
        keeps = not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
        found.append((name, tensor if keeps else tensor.to(dtype)))
    if found:
        parts = "parts that were not trained (MTP heads, vision, audio)"
        logger.info("%d tensors of %s are copied from %s", len(found), parts, source)
    return found
