"""A box of the kind that `--sandbox` names: from the pool of this machine, or a vendor's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from slime.agent.sandbox.base import Limits, Sandbox, SandboxUnavailable
from slime.agent.sandbox.box_pool import shared_pool
from slime.catalog.sandboxes import SANDBOXES
from slime.utils.misc import is_installed, load_function


@contextlib.asynccontextmanager
async def open_sandbox(
    kind: str = "local", *, image: str | None = None, limits: Limits | None = None, num_boxes: int = 32
) -> AsyncIterator[Sandbox]:
    """A fresh box, ended afterwards. `limits` are those of a local box; a vendor's are set by its image.

    Example: `async with open_sandbox(args.sandbox, image=args.sandbox_image) as box: await box.exec("ls")`.
    """
    if kind not in SANDBOXES:
        raise ValueError(f"--sandbox is {kind!r}; choose from {', '.join(SANDBOXES)}")
    row = SANDBOXES[kind]
    if row.is_local:
        async with shared_pool(limits, num_boxes=num_boxes, isolation=row.isolation).box() as box:
            yield box
        return
    if row.package is not None and not is_installed(row.package):
        raise SandboxUnavailable(
            f"--sandbox {kind} needs the package {row.package}: pip install 'slime[{row.extra}]'"
        )
    async with load_function(row.make)(image) as remote:
        yield remote
