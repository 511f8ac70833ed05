"""Defines the identity of a run, known to all its processes: its name, its folder, its shared memory."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slime.utils.http_utils import TOKEN_VARIABLE, authorize, is_loopback

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineToken:
    """The secret that engines require from other machines; each run makes its own.

    `given`: the user set it in the environment, so all engines require it, external ones included.
    """

    value: str = field(repr=False)
    given: bool

    @classmethod
    def make(cls) -> EngineToken:
        given = os.environ.get(TOKEN_VARIABLE)
        return cls(given or secrets.token_urlsafe(32), bool(given))

    def at(self, host: str) -> str | None:
        """Return the token for requests to this address; None if an engine that binds it requires none."""
        return self.value if self.given or not is_loopback(host) else None

    def use_for(self, engine_url: str) -> None:
        """Add the token to requests to that engine; call it before the first request."""
        authorize(engine_url, self.at(urlsplit(engine_url).hostname or ""))


@dataclass(frozen=True, slots=True)
class Run:
    """A run. `host`: the host of the trainer's first rank. `num_starts`: how often the run was started.

    `own_host`: the host of the rank that has this object, by the address that the scheduler knows. `inputs`:
    digests of the files that define the run, by name.
    """

    run_id: str
    run_dir: Path
    shm_prefix: str
    num_starts: int = 1
    host: str = LOOPBACK
    own_host: str = LOOPBACK
    engine_token: EngineToken = field(default_factory=EngineToken.make)
    inputs: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def pushes_as(self) -> str:
        """Return the prefix of weight versions; a resumed start has its own, because it repeats numbers."""
        return self.run_id if self.num_starts == 1 else f"{self.run_id}.{self.num_starts}"
