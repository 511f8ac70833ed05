"""The old policy: keeps the weights of the last two pushes, so that ratios use the weights that sampled."""

import json
import logging
from pathlib import Path

import torch

from slime.arguments import Args
from slime.backends.shared.checkpoint_errors import unreadable_named
from slime.backends.shared.trainer_base import TrainBackend
from slime.backends.shared.weight_copies import BEFORE, NEWEST
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

FILE = "kept_versions.json"  # in a checkpoint; the name is part of the format


class OldPolicy:
    """Keeps old weights on one rank, because asynchronous runs train on samples of an older push."""

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend
        self._numbers: dict[str, int] = {}

    def note_push(self, number: int) -> None:
        """Record that engines got the live weights as version `number`."""
        if NEWEST in self._numbers:
            self._backend.copy_weights(NEWEST, BEFORE)
            self._numbers[BEFORE] = self._numbers[NEWEST]
        self._backend.copy_weights("actor", NEWEST)
        self._numbers[NEWEST] = number

    def save(self, path: Path) -> None:
        """Write which versions the copies in `path` are. One rank calls it; the backend saves the copies."""
        (path / FILE).write_text(json.dumps(self._numbers))

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, after the backend has loaded the copies."""
        if not (path / FILE).is_file():
            logger.warning(
                "--keep-old-actor: checkpoint %s holds no weights of earlier pushes (it was saved without "
                "the flag): samples that it left unfinished or untrained cannot be trained on, and stop the "
                "run.",
                path,
            )
            return
        with unreadable_named(path / FILE):
            self._numbers = json.loads((path / FILE).read_text())
        for tag, number in self._numbers.items():
            if tag not in self._backend.copies:
                raise ValueError(
                    f"checkpoint {path} says that it keeps the weights of push {number}, but its folder "
                    f"{tag} is missing: restore it, or remove {FILE} to continue without them."
                )

    def tag_of(self, batch: RolloutBatch, current: int | None) -> str:
        """The tag of the weights that sampled the batch; "actor": the live ones (version `current`)."""
        if "versions" not in batch:
            raise ValueError(
                "--keep-old-actor: the samples have no weight version; use an engine that reports it."
            )
        sums = torch.zeros(2, dtype=torch.float64)
        for versions, mask in zip(batch["versions"], batch["loss_masks"], strict=True):
            chosen = versions[(mask != 0) & (versions >= 0)].double()
            sums += torch.stack([chosen.sum(), torch.tensor(float(len(chosen)))])
        total, count = self._backend.sum_over_ranks(sums).tolist()
        # For a batch of several versions, the median version, which is closest to all others.
        number = round(total / max(count, 1.0))
        if number == current:
            return "actor"
        for tag, kept in self._numbers.items():
            if kept == number:
                return tag
        raise ValueError(
            f"--keep-old-actor keeps the weights of the last two pushes ({sorted(self._numbers.values())}), "
            f"but the batch was sampled by version {number}; push weights more rarely "
            "(--update-weights-interval), or use --use-rollout-logprobs."
        )


def old_policy_of(args: Args, backend: TrainBackend) -> OldPolicy | None:
    return OldPolicy(backend) if args.keep_old_actor else None
