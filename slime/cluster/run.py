"""The identity of a run: its name, its folder and the prefix of what it shares in memory."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from slime.arguments import Args
from slime.utils import shm


@dataclass(frozen=True, slots=True)
class Run:
    """Known to every process of the run. `host`: where the trainer's first rank is found."""

    run_id: str
    run_dir: Path
    shm_prefix: str
    host: str = "127.0.0.1"


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
