"""The table of transports, and which one a run uses."""

from __future__ import annotations

from collections.abc import Iterable

from slime.weight_sync.base import Transport
from slime.weight_sync.disk import DISK
from slime.weight_sync.tensor import TENSOR

TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in (TENSOR, DISK)}


def choose_transport(wanted: str, offered: Iterable[str]) -> Transport:
    """The transport that `--update-weight-transport` names, or for "auto" the first that every engine takes."""
    offered = set(offered)
    if wanted != "auto":
        transport = TRANSPORTS[wanted]
        if transport.engine_needs not in offered:
            raise ValueError(
                f"--update-weight-transport {wanted} needs engines that take {transport.engine_needs!r}; "
                f"these take {', '.join(sorted(offered))}: use --update-weight-transport auto"
            )
        return transport
    for transport in TRANSPORTS.values():
        if transport.engine_needs in offered:
            return transport
    raise ValueError(f"no weight transport of slime is among those the engines take: {', '.join(sorted(offered))}")
