"""Calls a user's function after weights are written to a folder and before engines read them.

The function can make a folder visible to engines without a shared file system: upload a version, commit a
volume, or drop a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.arguments import PluginArgs
from slime.utils.errors import RunStopped
from slime.utils.plugin_errors import place_of

FLAG = "--custom-update-weight-post-write-path"


class PostWrite:
    """`function(args, version_dir, rollout_engines)`; the engines are their addresses."""

    def __init__(
        self, function: Callable[..., Any], args: PluginArgs, engine_urls: tuple[str, ...], rank: int
    ):
        self._function, self._args, self._engine_urls, self._rank = function, args, engine_urls, rank

    def __call__(self, folder: Path) -> None:
        try:
            self._function(self._args, str(folder), list(self._engine_urls))
        except Exception as error:
            path = self._args.custom_update_weight_post_write_path or ""
            raise RunStopped(
                f"{FLAG} raised on rank {self._rank} for {folder}: {type(error).__name__}: {error}; the "
                f"engines were not notified of these weights.\n  at {place_of(error, path)}"
            ) from error

    def on_every_rank(self, folder: Path | None) -> None:
        """Call the function on every rank: only the first rank knows the folder (None on the others)."""
        known: list[str | None] = [str(folder) if folder is not None else None]
        dist.broadcast_object_list(known, src=0)
        assert known[0] is not None, "only transports that write a folder call this"
        self(Path(known[0]))
