"""Computes what a server should return with transformers, and what it would return with a known fault."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slime.cluster.canary.probe import LogProbs
from slime.utils.models.model_config import read_config
from slime.utils.processing_utils import load_tokenizer

ADAPTER_CONFIG = "adapter_config.json"
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_MOST = 4  # checkpoints next to the given one that are compared, too
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
Fault = tuple[str, AbstractContextManager[Any]]  # what the server does, and how to do it here


class Reference:
    """A model in transformers, with the adapter if one is given, and ways to break it on purpose."""

    def __init__(self, model: Path, adapter: Path | None, device: str):
        self._folder, self._adapter, self._device = model, adapter, device
        self.tokenizer = load_tokenizer(str(model))
        from transformers import AutoModelForCausalLM  # heavy import

        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.plain = self.lm = lm.to(device).eval()
        if adapter is not None:
            from peft import PeftModel  # slime[lora]: only adapters need it

            self.lm = PeftModel.from_pretrained(self.plain, str(adapter)).eval()

    @torch.inference_mode()
    def table(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the log-probs [tokens, vocabulary] after each token."""
        logits = self.lm(input_ids=torch.tensor([list(ids)], device=self._device)).logits
        return logits[0].float().log_softmax(-1).cpu()

    def score(self, texts: Sequence[Sequence[int]]) -> LogProbs:
        """Return the log-probs of all tokens but the first of each text."""
        tables = [self.table(ids)[:-1] for ids in texts]
        return [
            table.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()
            for table, ids in zip(tables, texts, strict=True)
        ]

    def rounded(self, texts: Sequence[Sequence[int]]) -> LogProbs:
        """Score with matrix products in bfloat16: how far a faithful server may be off."""
        with torch.autocast(torch.device(self._device).type, dtype=torch.bfloat16):
            return self.score(texts)

    # -- faults: each is a sentence about the server, and a context in which this model has the fault

    def likely_faults(self, others: Sequence[Path]) -> Iterator[Fault]:
        """Yield what goes wrong most often: adapters, other checkpoints, positions, precision."""
        if self._adapter is not None:
            yield "serves the model without the adapter", self.lm.disable_adapter()
            scales = {module.scaling["default"] for _, module in self._adapted()}
            for scale in scales - {0.0, 1.0}:
                yield "ignores the adapter's lora_alpha", self._scaled(1 / scale)
            yield "applies the adapter twice (merged, and once more)", self._scaled(2.0)
        for folder in others:
            yield f"serves {folder}", self._other(folder)
        yield from self._other_positions()
        yield "serves weights rounded to FP8", self._in_fp8()

    def weight_faults(self) -> Iterator[Fault]:
        """Yield exchanged tensors, in all layers and in one, exchanged layers, and adapters in part."""
        if self._adapter is not None:
            kinds = sorted({name.rpartition(".")[2] for name, _ in self._adapted()})
            for kind in kinds if len(kinds) > 1 else ():
                yield f"does not apply the adapter to {kind}", self._scaled(0.0, kind)
        lists = [module for module in self.plain.modules() if isinstance(module, nn.ModuleList)]
        layers: list[nn.Module] = list(max(lists, key=len, default=()))
        held = {f"layer {i}": [dict(layer.named_parameters())] for i, layer in enumerate(layers)}
        held = {"all layers": [one for [one] in held.values()], **held}
        names = [name for one in held["all layers"][:1] for name in one if "lora_" not in name]
        for (where, some), (a, b) in itertools.product(held.items(), itertools.combinations(names, 2)):
            tensors = [(one[a], one[b]) for one in some if a in one and b in one]
            yield from _exchanged(f"{a} and {b} exchanged in {where}".replace(".base_layer", ""), tensors)
        for i, (one, two) in enumerate(itertools.pairwise(layers)):
            tensors = list(zip(one.parameters(), two.parameters(), strict=False))
            yield from _exchanged(f"layers {i} and {i + 1} exchanged", tensors)

    def _adapted(self) -> list[tuple[str, Any]]:
        return [(name, m) for name, m in self.lm.named_modules() if getattr(m, "lora_A", None)]

    def _scaled(self, factor: float, kind: str | None = None) -> AbstractContextManager[None]:
        chosen = [m for name, m in self._adapted() if kind in (None, name.rpartition(".")[2])]
        factors = [m.lora_B["default"].weight for m in chosen]
        return _changed([(weight, weight * factor) for weight in factors])

    @contextlib.contextmanager
    def _other(self, folder: Path) -> Iterator[None]:
        """Compute with another adapter, or with another model (and the given adapter on it)."""
        is_adapter, before = (folder / ADAPTER_CONFIG).is_file(), self.lm
        model, adapter = (self._folder, folder) if is_adapter else (folder, self._adapter)
        self.lm = Reference(model, adapter, self._device).lm
        try:
            yield
        finally:
            self.lm = before

    def _other_positions(self) -> Iterator[Fault]:
        own = getattr(self.plain.config, "rope_parameters", None)
        if not isinstance(own, dict) or "rope_theta" not in own:
            return
        plain = {"rope_type": "default", "rope_theta": own["rope_theta"]}
        if own.get("rope_type", "default") != "default":
            yield f"ignores the {own['rope_type']} scaling of rope_parameters", self._positions(plain)
        for theta in _THETAS:
            if theta != own["rope_theta"]:
                said = f"computes positions with rope_theta {theta:.0f} instead of {own['rope_theta']:.0f}"
                yield said, self._positions({**own, "rope_theta": theta})

    def _positions(self, parameters: dict[str, Any]) -> AbstractContextManager[None]:
        config = copy.deepcopy(self.plain.config)
        config.rope_parameters = parameters
        rotary = [m for m in self.plain.modules() if "inv_freq" in dict(m.named_buffers(recurse=False))]
        return _changed([(m.inv_freq, type(m)(config).to(self._device).inv_freq) for m in rotary])

    def _in_fp8(self) -> AbstractContextManager[None]:
        """Round the matrices of the layers to FP8, with a scale for each row."""
        changes = []
        for name, p in self.plain.named_parameters():
            if p.ndim == 2 and ".layers." in name:
                scale = p.data.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
                changes.append((p, (p.data / scale).to(torch.float8_e4m3fn).float() * scale))
        return _changed(changes)


@contextlib.contextmanager
def _changed(changes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Give tensors the values of others in this block."""
    before = [(tensor, tensor.data) for tensor, _ in changes]
    new = [(tensor, value.data) for tensor, value in changes]
    try:
        for tensor, data in new:
            tensor.data = data
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _exchanged(said: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Fault]:
    if all(one.shape == two.shape for one, two in pairs):
        yield f"has {said}", _changed([*pairs, *((two, one) for one, two in pairs)])


def siblings(folder: Path) -> list[Path]:
    """Return folders next to a model or an adapter that hold another version of it, the latest first."""
    folder = folder.resolve()
    name = ADAPTER_CONFIG if (folder / ADAPTER_CONFIG).is_file() else "config.json"
    times = {path.parent: path.stat().st_mtime for path in folder.parent.glob(f"*/{name}")}
    found = sorted(times, key=lambda one: -times[one])
    own, *others = ([read_config(one, name).get(key) for key in _SHAPE] for one in (folder, *found))
    return [one for one, shape in zip(found, others, strict=True) if shape == own and one != folder][:_MOST]
