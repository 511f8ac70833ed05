"""Verifies the first push against the weights that engines loaded themselves from the same model.

Once engines have loaded the model, their checksums are noted. Before the first push, their weights are
overwritten with noise. An engine that has the noted checksums again after the push received every tensor
in the form that its own loader produces, and no file was written or read for this proof.

Not covered are tensors without checksums, such as tables of positions, which are not overwritten either.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from slime.arguments import Args
from slime.catalog.vision import VISION_FAMILIES
from slime.utils.http_utils import HttpError
from slime.utils.models.model_config import read_config
from slime.weight_sync.verify import differing
from slime.wire.control import EngineControl

logger = logging.getLogger(__name__)


def starts_as_served(args: Args, checkpoint: Path | None) -> bool:
    """Return whether the trainer starts with the weights that engines load, in an unquantized format."""
    model = args.hf_checkpoint
    if checkpoint is not None or model is None:
        return False
    config, served = read_config(model), args.engine_topology.policy.model_path
    return (
        args.start_from == model == served
        and not (args.lora_rank or args.rollout_external_engine_addrs)
        and args.update_weight_mode == "full"
        and args.rollout_quantization == "none"
        and "quantization_config" not in config
        and config.get("model_type") not in VISION_FAMILIES
    )


LifeKey = tuple[str, int]  # the address of an engine, and which of its processes this is


class LoadedWeights:
    """Checksums of the weights that engines loaded themselves, before the first push."""

    def __init__(self) -> None:
        self._noted: dict[LifeKey, Mapping[str, str]] = {}

    async def note(self, key: LifeKey, control: EngineControl) -> None:
        self._noted[key] = await control.checksums()

    async def overwrite(self, key: LifeKey, control: EngineControl) -> None:
        """Overwrite a paused engine's weights with noise, so that a tensor that the push omits is noticed."""
        if key not in self._noted:
            return
        try:
            await control.overwrite_weights()
        except HttpError as error:
            logger.warning("The first push to engine %s is compared with files instead: %s", key[0], error)
            del self._noted[key]
        await control.flush()  # frees the memory that the noise needed

    def is_noted(self, key: LifeKey) -> bool:
        return key in self._noted

    def differing_tensors(self, key: LifeKey, held: Mapping[str, str]) -> list[str] | None:
        """Return the tensors that differ from the loaded ones; None: the engine was not overwritten."""
        return differing(self._noted[key], held) if key in self._noted else None

    def forget(self) -> None:
        """Forget the checksums: later pushes bring other weights."""
        self._noted = {}
