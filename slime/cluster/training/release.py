"""`--release-train`: the trainer's processes end while engines generate, and come back to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slime.arguments import Args
from slime.cluster.training.train_actor import Memory, TrainActor
from slime.cluster.training.train_group import RankProcesses
from slime.liveness import phases
from slime.runtime.base import gather
from slime.utils.files.step_folders import TRAINER, step_path

# These flags concern the checkpoint of --load, which later processes do not load.
OF_THE_FIRST_START = {"finetune": False, "no_load_optim": False, "no_load_rng": False}


class TrainerRelease:
    """Ends and restarts the ranks. `checkpoint`: what the run starts from. `prepare`: sets up new ranks.

    Nothing is lost on the way: weights, optimizer, schedule and random state are in the checkpoint of the
    rollout before, which is complete before the processes end; the rest is `Memory`.
    """

    def __init__(
        self, args: Args, ranks: RankProcesses, checkpoint: Path | None, prepare: Callable[[], object]
    ):
        self._args, self._ranks, self._prepare = args, ranks, prepare
        self._checkpoint = checkpoint
        self._memories: list[Memory] = []

    def leave(self) -> None:
        """End the processes after a push: engines have the weights, and nothing else needs the trainer."""
        self._memories = self._ranks.actors.call(TrainActor.memory)
        self._ranks.end()

    def wake(self) -> bool:
        """Start the processes again where they have left; False: they are there already."""
        if not self._ranks.away:
            return False
        with phases.doing("starting the trainer"):
            self._ranks.renew(self._args)
            self._ranks.load_again(self._checkpoint)
            self._prepare()
            actors = self._ranks.actors.handles
            pairs = zip(actors, self._memories, strict=True)
            gather([actor.call(TrainActor.remember, memory) for actor, memory in pairs])
        return True

    def saved(self, rollout_id: int) -> None:
        """Note a complete checkpoint: the next processes load it."""
        assert self._args.save is not None, "the rules ask for --save"
        self._checkpoint = step_path(self._args.save, rollout_id) / TRAINER
        self._args = self._args.replace(**OF_THE_FIRST_START)
