"""Converts weights for an FP8 model: decides which become FP8, and rewrites a stream of tensors.

The format is defined by `quantization_config` in the checkpoint's config.json. Linear weights become e4m3
with fp32 factors; embedding, output matrix, norms, routers and excluded modules are not converted.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.utils.files.safetensors_files import files_by_tensor
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, quantize_blocks, uniform_noise
from slime.utils.models.model_config import quantization_config

Converter = Callable[[list[tuple[str, Tensor]]], list[tuple[str, Tensor]]]
_WEIGHT = ".weight"
SERVED_BLOCK = (128, 128)  # the block size that engines' kernels support
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|wte|wpe)$")
# No FP8 checkpoint quantises these matrices, whatever its config says: they are looked up, or decide.
_NEVER = re.compile(
    r"(^|\.)(embed_tokens|embeddings?|wte|wpe|lm_head|score|gate|router|shared_expert_gate|eh_proj)$"
)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Storage format of the weights of one FP8 checkpoint.

    Example: Qwen3-8B-FP8 has block (128, 128) and no exclusions: `model.layers.0.mlp.up_proj.weight` is e4m3,
    and `model.layers.0.mlp.up_proj.weight_scale_inv` its fp32 factors.
    """

    block: tuple[int, int]
    excluded: tuple[str, ...] = ()  # modules, as patterns
    included: tuple[str, ...] = ()  # modules that are converted although others of their kind are not
    powers_of_two: bool = False
    # Weights that the checkpoint has in FP8; None: not known, the patterns decide.
    names: frozenset[str] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], names: frozenset[str] | None = None) -> Fp8Format:
        """Reads the `quantization_config` of a config.json; another kind of quantisation is a ValueError."""
        block = config.get("weight_block_size")
        wanted = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        for name, value in wanted.items():
            # The last two have these values if they are missing.
            if config.get(name, None if name == "quant_method" else value) != value:
                raise ValueError(
                    f"quantization_config has {name} {config.get(name)!r}: weights are only written with "
                    f"{value!r}; use a checkpoint of that kind, or one that is not quantised."
                )
        if block is None or len(block) != 2 or min(block) < 1:
            raise ValueError(
                f"quantization_config has weight_block_size {block!r}: weights are only written in blocks, "
                "such as [128, 128]."
            )
        excluded = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        return cls(
            block=(int(block[0]), int(block[1])),
            excluded=tuple(excluded),
            included=tuple(config.get("modules_to_convert") or ()),
            powers_of_two=config.get("scale_fmt") == "ue8m0",
            names=names,
        )

    def converts(self, name: str, tensor: Tensor) -> bool:
        """Return whether the checkpoint holds this tensor in FP8."""
        if self.names is not None:
            return name in self.names
        if not name.endswith(_WEIGHT) or tensor.dim() != 2:
            return False
        module = name.removesuffix(_WEIGHT)
        if any(_matches(pattern, module) for pattern in self.included):
            return True
        return not _NEVER.search(module) and not any(_matches(pattern, module) for pattern in self.excluded)


def quantize_state(
    named: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as an FP8 checkpoint with this `quantization_config` holds them, in order."""
    return quantize_named(named, Fp8Format.from_config(config))


def quantize_named(
    named: Iterable[tuple[str, Tensor]],
    how: Fp8Format,
    dither_seed: int | None = None,
    *,
    known_finite: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """`quantize_state` for a known format. `known_finite`: the caller has checked that values are finite.

    `dither_seed` None: to the nearest value. Otherwise up or down by a number that belongs to each weight for
    the whole run: over the weights of a matrix the rounding is right on average, also for changes that are
    far smaller than a step of FP8, and a weight that does not change is never written otherwise than before.
    """
    for name, tensor in named:
        if not how.converts(name, tensor):
            yield name, tensor
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.dim() != 2:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: only matrices of 16 bit or more "
                "become FP8."
            )
        noise = None
        if dither_seed is not None:
            noise = uniform_noise(tensor.shape, zlib.crc32(f"{dither_seed}/{name}".encode()), tensor.device)
        values, scale = quantize_blocks(tensor, how.block, powers_of_two=how.powers_of_two, noise=noise)
        if not known_finite and not bool(scale.isfinite().all()):  # waits for the device
            raise ValueError(f"{name} holds NaN or infinite values: it cannot be written as FP8.")
        yield name, values
        yield name + SCALE_SUFFIX, scale


def checkpoint_format(folder: str | Path) -> Fp8Format | None:
    """Return the format of the checkpoint in a folder; None: not quantised, or it has no config.

    Its files decide which weights are FP8; only if they cannot be listed, the patterns of its config do.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text()).get("quantization_config")
    if not config:
        return None
    scales = {name for name in files_by_tensor(Path(folder)) if name.endswith(_WEIGHT + SCALE_SUFFIX)}
    names = frozenset(name.removesuffix(SCALE_SUFFIX) for name in scales)
    try:
        return Fp8Format.from_config(config, names or None)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def make_converter(folder: str | Path, config: Mapping[str, Any] | None, seed: int | None) -> Converter:
    """Return what converts tensors to the format that engines were started with, else to the checkpoint's."""
    how = Fp8Format.from_config(config) if config else checkpoint_format(folder)
    assert how is not None, f"the weights of {folder} are not quantised"
    return lambda named: list(quantize_named(named, how, seed, known_finite=True))


def engine_config(engine: str, folder: str | Path) -> dict[str, Any]:
    return served_config(folder)


def served_config(folder: str | Path) -> dict[str, Any]:
    """Return the `quantization_config` with which engines serve a 16-bit checkpoint in FP8."""
    modules = [name.removesuffix(_WEIGHT) for name in files_by_tensor(Path(folder)) if name.endswith(_WEIGHT)]
    # Embeddings are no linear layers, so engines do not convert them.
    kept = [module for module in modules if _NEVER.search(module) and not _EMBEDDING.search(module)]
    return quantization_config(SERVED_BLOCK, kept=sorted(kept))


def _matches(pattern: str, module: str) -> bool:
    """Return whether a quantization_config pattern matches a module: by name, parent's name or regex."""
    if module == pattern or module.startswith(pattern + ".") or module.endswith(pattern):
        return True
    try:
        return re.match(rf"(?:{pattern})(?:\.|$)", module) is not None
    except re.error:
        return False  # a plain name with odd characters
