"""Loads HF weights into a sharded model without a full copy on each rank.

A model is built without storage for its parameters, sharded, and given storage for its shards. Then every
rank reads from the safetensors files only the rows and columns that it holds, also of the experts that
transformers stacks in one tensor; FP8 weights are converted to fp32. If transformers computes a family's
tensors from those of the files otherwise, the first rank converts them and broadcasts tensor by tensor.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime.backends.fsdp import families, vision
from slime.backends.fsdp.hf_export import hub_shapes
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.lora import hub_name, is_adapter
from slime.backends.shared.hub_folder import CheckpointFolder, listed
from slime.backends.shared.placed_adam import local
from slime.backends.torch_dist.reading import TorchDistFolder, check_fit
from slime.utils.files.safetensors_files import files_by_tensor, model_files
from slime.utils.files.torch_dist_folder import is_torch_dist
from slime.utils.models.hub_names import Part, folder_of, parts_of, saved_tensors
from slime.utils.models.model_config import block_size_of

logger = logging.getLogger(__name__)

Reader = Callable[[tuple[slice, ...]], Tensor]  # a region of one tensor


def empty_model(path: str | Path) -> HFModel:
    """The HF causal LM of the folder or hub id `path`: fp32 master weights, no storage, packed attention."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file() and Path(path).exists():
        raise ValueError(
            f"--hf-checkpoint {path}: no config.json there, so it is not a Hugging Face model folder."
        )
    with without_storage():
        return families.build(AutoConfig.from_pretrained(path))


@contextmanager
def without_storage() -> Iterator[None]:
    """Construct a model within this block: its parameters get no storage, and its buffers are computed.

    No file holds most buffers, and any module may compute those of another one, as Falcon-H1's decoder does
    for its layers. So none can be computed later without the code that constructs the whole model.
    """
    register = nn.Module.register_parameter

    def registerwithout_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            module._parameters[name] = empty

    with mock.patch.object(nn.Module, "register_parameter", registerwithout_storage):
        yield


def known_values(lm: HFModel) -> dict[str, Tensor]:
    """Return parameters with values from before sharding (a new head, adapters): they are kept, not read."""
    return {name: parameter.data for name, parameter in lm.named_parameters() if not parameter.is_meta}


def allocate(model: Any, device: torch.device, *, compute: torch.device | None = None) -> None:
    """Give this rank's shards storage on `device`, and move the buffers to `compute`."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        assert not buffer.is_meta, f"buffer {name} of {type(module).__name__} was never computed"
        module._buffers[name] = buffer.to(compute or device)
    # Each use of a tied matrix got its own storage.
    model.lm.tie_weights()


@torch.no_grad()
def fill(lm: HFModel, path: str | Path, known: dict[str, Tensor] | None = None) -> None:
    """Write the weights of the HF folder or hub id `path`, and the `known` ones, into this rank's shards.

    `path` may be a torch_dist folder of such a model.
    """
    known = known or {}
    wanted = {name: t for name, t in saved_tensors(lm) if name not in known and not is_adapter(name)}
    for name, tensor in saved_tensors(lm):
        if name in known:
            write_part(tensor, known[name].__getitem__)
    folder: TorchDistFolder | CheckpointFolder | None = None
    if is_torch_dist(path):
        folder = TorchDistFolder(path, lm.config)
        lm.hub_names = frozenset(folder.names)
        expected = hub_shapes(lm.config)
        if "lm_head.weight" not in map(hub_name, wanted):
            expected.pop("lm_head.weight", None)  # replaced by another head
        check_fit(folder, expected)
    else:
        held = folder_of(str(path))
        lm.hub_names = frozenset(files_by_tensor(held))
        files = model_files(held)
        if files and all(file.is_file() for file in files):
            folder = CheckpointFolder(held)
    parts = None if folder is None else _parts(lm, wanted, folder)
    if folder is None or parts is None:
        _broadcast(lm, wanted, path)
        return
    _check_shapes(parts, folder, path)
    for name, tensor in wanted.items():
        region, own = region_of(tensor), local(tensor)
        for part in parts[hub_name(name)]:
            if (found := part.within(region)) is not None:
                held_here, wanted_there = found
                held_here.of(own).copy_(folder.read(part.name, wanted_there))


def _parts(
    lm: HFModel, wanted: dict[str, Tensor], folder: TorchDistFolder | CheckpointFolder
) -> dict[str, list[Part]] | None:
    """Return the tensors of the folder in each wanted one; None: transformers has to convert them."""
    try:
        parts = parts_of(lm, {hub_name(name): tensor for name, tensor in wanted.items()}, lm.hub_names)
    except ValueError as error:
        logger.info("The first rank reads the whole model with transformers, because %s.", error)
        return None
    names = folder.names
    return parts if all(part.name in names for own in parts.values() for part in own) else None


def _check_shapes(
    parts: dict[str, list[Part]], folder: TorchDistFolder | CheckpointFolder, path: str | Path
) -> None:
    """Raise ValueError if a file's tensor has another size: part of a larger one would look complete."""
    for part in (part for own in parts.values() for part in own):
        held = tuple(folder.shape(part.name))
        if held != part.shape:
            raise ValueError(
                f"{path}: {part.name} is {held} in its file, but {part.shape} by config.json: the "
                "configuration and the weights are of different models; copy both again."
            )


def write_part(target: Tensor, read: Reader) -> None:
    """Fill this rank's part of `target` from `read(region of the whole tensor)`."""
    own = local(target)
    if own.numel() == 0:
        return
    value = read(region_of(target))
    assert value.shape == own.shape, f"read {tuple(value.shape)} for a shard of {tuple(own.shape)}"
    own.copy_(value)


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank holds."""
    ranges = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        # The last mesh dimension (tensor parallel) splits first, then FSDP shards the result.
        for dimension in reversed(range(tensor.device_mesh.ndim)):
            placement: Any = tensor.placements[dimension]  # kinds of placement that split have `dim`
            if not placement.is_replicate():
                start, end = ranges[placement.dim]
                count, rank = tensor.device_mesh.size(dimension), tensor.device_mesh.get_local_rank(dimension)
                part = -(-(end - start) // count)
                first = min(start + rank * part, end)
                ranges[placement.dim] = (first, min(first + part, end))
    return tuple(slice(start, end) for start, end in ranges)


def _broadcast(lm: HFModel, wanted: dict[str, Tensor], path: str | Path) -> None:
    """Load through transformers, which converts, on the first rank, and send tensor by tensor."""
    source = _converted(lm, path) if dist.get_rank() == 0 else {}
    missing = [[name for name in wanted if hub_name(name) not in source]]
    dist.broadcast_object_list(missing, src=0)
    if missing[0]:
        raise ValueError(f"{path} has no weights for {listed(missing[0])}: it is another model's folder.")
    device = torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda")
    for name, tensor in wanted.items():
        if source:
            full = source[hub_name(name)].to(device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(full, src=0)
        write_part(tensor, full.__getitem__)


def _converted(lm: HFModel, path: str | Path) -> dict[str, Tensor]:
    """Return the whole model by its names in memory, without tensors that `path` lacks."""
    # Heavy import, only needed where a model is loaded.
    from transformers import FineGrainedFP8Config

    how: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    if block_size_of(path):
        how["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    model, report = vision.auto_class(lm.config).from_pretrained(path, **how)
    # transformers fills missing tensors with random numbers, and only logs it.
    return {name: value for name, value in model.state_dict().items() if name not in report["missing_keys"]}
