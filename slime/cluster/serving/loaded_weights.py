"""Proof of the first push by what engines loaded themselves, where the trainer begins with the same model.

Once engines have loaded it, and while the trainer does, their checksums are noted. Before the first push
their weights are overwritten with noise. An engine that has the noted checksums again afterwards got every
tensor by the push, and holds it as its own loader makes it of the files: without a file written or read.

Not covered: what engines do not tell checksums of, such as tables of positions, which they do not overwrite
either.
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


def begins_as_served(args: Args, checkpoint: Path | None) -> bool:
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
    """The checksums of engines before anything was pushed to them."""

    def __init__(self) -> None:
        self._noted: dict[LifeKey, Mapping[str, str]] = {}

    async def note(self, key: LifeKey, control: EngineControl) -> None:
        self._noted[key] = await control.checksums()

    async def overwrite(self, key: LifeKey, control: EngineControl) -> None:
        """Called on a paused engine: what the push leaves out cannot pass for what it brought. Else no-op."""
        if key not in self._noted:
            return
        try:
            await control.overwrite_weights()
        except HttpError as error:
            logger.warning("the first push to %s is compared with files instead: %s", key[0], error)
            del self._noted[key]
        await control.flush()  # gives back the memory that making noise took

    def apart(self, key: LifeKey, held: Mapping[str, str]) -> list[str] | None:
        """Tensors that are not as they were loaded; None: the engine was not overwritten."""
        return differing(self._noted[key], held) if key in self._noted else None

    def forget(self) -> None:
        """Pushes from now on bring other weights."""
        self._noted = {}
