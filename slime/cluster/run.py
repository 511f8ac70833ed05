"""The identity of a run: its name, its folder and the prefix of what it shares in memory."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slime.arguments import Args
from slime.utils import shm
from slime.utils.http_utils import TOKEN_VARIABLE, authorize, is_loopback
from slime.utils.run_file import close_run_file, open_run_file, resumption_of
from slime.utils.step_folders import StepFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineToken:
    """What engines ask of who speaks to them. A new one for each run, which
    those ask for that other machines reach.

    `given`: it stands in the environment, and all engines ask for it,
    also those that somebody else has started.
    """

    value: str = field(repr=False)
    given: bool

    @classmethod
    def make(cls) -> EngineToken:
        given = os.environ.get(TOKEN_VARIABLE)
        return cls(given or secrets.token_urlsafe(32), bool(given))

    def at(self, host: str) -> str | None:
        """None: an engine that binds this address asks for nothing."""
        return self.value if self.given or not is_loopback(host) else None

    def use_for(self, engine_url: str) -> None:
        """Before this process speaks to that engine."""
        authorize(engine_url, self.at(urlsplit(engine_url).hostname or ""))


@dataclass(frozen=True, slots=True)
class Run:
    """Known to every process of the run. `host`: where the trainer's first rank is found."""

    run_id: str
    run_dir: Path
    shm_prefix: str
    num_starts: int = 1
    host: str = "127.0.0.1"
    engine_token: EngineToken = field(default_factory=EngineToken.make)

    @property
    def pushes_as(self) -> str:
        """The first part of weight versions. A resumed run may push other
        weights under a number that was pushed before.
        """
        return self.run_id if self.num_starts == 1 else f"{self.run_id}.{self.num_starts}"


def open_run(args: Args, checkpoint: StepFolder | None = None) -> Run:
    """Makes the folder the run's own, records settings, and removes what dead runs left in shared memory."""
    shm.unlink_stale()
    run_dir = Path(args.run_dir).absolute()  # processes elsewhere have folders of their own to start from
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        name: {"value": value, "source": args.sources.get(name)}
        for name, value in args.to_dict(hide_secrets=True).items()
    }
    resumed = None
    if checkpoint is not None:
        manifest = checkpoint.manifest
        resumed = {"checkpoint": str(checkpoint.path), "run": manifest.run_id, "rollout": manifest.rollout_id}
    record = open_run_file(
        run_dir,
        settings,
        str(Path(args.save).absolute()) if args.save is not None else None,
        resumption_of(args.load, args.ckpt_step, args.finetune),
        resumed,
    )
    return Run(record.id, run_dir, shm.make_prefix(), record.num_starts)


def close_run(run: Run, error: BaseException | None) -> None:
    """Records end and cause."""
    try:
        close_run_file(run.run_dir, error)
    except OSError as failure:  # what ended the run matters more
        logger.warning("%s: the end of the run was not recorded: %s", run.run_dir, failure)
