"""The identity of a run: its name, its folder and the prefix of what it shares in memory."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slime.arguments import Args
from slime.utils import shm
from slime.utils.http_utils import TOKEN_VARIABLE, authorize, is_loopback


@dataclass(frozen=True, slots=True)
class EngineToken:
    """What engines ask of who speaks to them. A new one for each run, which those ask for that other machines reach.

    `given`: it stands in the environment, and all engines ask for it, also those that somebody else has started.
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
    host: str = "127.0.0.1"
    engine_token: EngineToken = field(default_factory=EngineToken.make)


def open_run(args: Args) -> Run:
    """Makes the folder, records the configuration, and removes what dead runs left in shared memory."""
    shm.unlink_stale()
    run_dir = Path(args.run_dir).absolute()  # processes elsewhere have folders of their own to start from
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        name: {"value": value, "source": args.sources.get(name)}
        for name, value in args.to_dict(hide_secrets=True).items()
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=1, default=str))
    return Run(run_id=secrets.token_hex(4), run_dir=run_dir, shm_prefix=shm.make_prefix())
