"""The identity of a run, known to all its processes: its name, its folder, its part of shared memory."""

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
    """The secret that engines ask for where other machines reach them; each run makes its own.

    `given`: it stands in the environment, and all engines ask for it, also those that somebody else started.
    """

    value: str = field(repr=False)
    given: bool

    @classmethod
    def make(cls) -> EngineToken:
        given = os.environ.get(TOKEN_VARIABLE)
        return cls(given or secrets.token_urlsafe(32), bool(given))

    def at(self, host: str) -> str | None:
        """The token that requests to this address carry; None where an engine that binds it asks for none."""
        return self.value if self.given or not is_loopback(host) else None

    def use_for(self, engine_url: str) -> None:
        """Gives requests to that engine their token; called before this process speaks to it."""
        authorize(engine_url, self.at(urlsplit(engine_url).hostname or ""))


@dataclass(frozen=True, slots=True)
class Run:
    """`host`: where the trainer's first rank is found. `num_starts`: one more with each resumption.

    `inputs`: digests of the files that define the run, by name.
    """

    run_id: str
    run_dir: Path
    shm_prefix: str
    num_starts: int = 1
    host: str = LOOPBACK
    engine_token: EngineToken = field(default_factory=EngineToken.make)
    inputs: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def pushes_as(self) -> str:
        """The first part of weight versions: a resumed run may push other weights under the same number."""
        return self.run_id if self.num_starts == 1 else f"{self.run_id}.{self.num_starts}"
