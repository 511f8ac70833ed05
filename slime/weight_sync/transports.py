"""The table of transports, and which one a run uses."""

from __future__ import annotations

from collections.abc import Iterable

from slime.weight_sync.base import LiveTransport, Site, Transport
from slime.weight_sync.cuda_ipc import CUDA_IPC
from slime.weight_sync.delta.transport import DELTA
from slime.weight_sync.disk import DISK
from slime.weight_sync.distributed import DISTRIBUTED
from slime.weight_sync.http_tensor import HTTP_TENSOR
from slime.weight_sync.lora import ADAPTER_SHARED_MEMORY, ADAPTER_TENSORS
from slime.weight_sync.shared_memory import SHARED_MEMORY

TRANSPORTS: dict[str, Transport] = {
    t.name: t for t in (SHARED_MEMORY, HTTP_TENSOR, DISK, DELTA, ADAPTER_SHARED_MEMORY, ADAPTER_TENSORS)
}
LIVE_TRANSPORTS: dict[str, LiveTransport] = {t.name: t for t in (CUDA_IPC, DISTRIBUTED)}
# For "auto", fastest first. Bodies of requests beat a group of gloo on a CPU machine, and lose to NCCL on
# GPUs. Of two that are equally slow, a folder asks less of the network than a group.
_ON_CPU: tuple[Transport | LiveTransport, ...] = (SHARED_MEMORY, HTTP_TENSOR, DISK, DISTRIBUTED, DELTA)
_ON_CUDA: tuple[Transport | LiveTransport, ...] = (
    SHARED_MEMORY,
    CUDA_IPC,
    DISTRIBUTED,
    DISK,
    HTTP_TENSOR,
    DELTA,
)


def choose_transport(
    wanted: str, offered: Iterable[str], site: Site | None = None, mode: str = "full"
) -> Transport | LiveTransport:
    """The first transport that --update-weight-transport and -mode allow, that
    every engine takes and that suits the site.
    """
    offered, site = set(offered), site or Site()
    order = _ON_CUDA if site.cuda else _ON_CPU
    allowed = [
        transport for transport in order if transport.mode == mode and wanted in ("auto", transport.choice)
    ]
    taken = [transport for transport in allowed if transport.engine_needs in offered]
    for transport in taken:
        if transport.suits(site):
            return transport
    if taken:
        raise ValueError(
            f"--update-weight-transport {wanted} does not work between a trainer and engines on the same "
            "GPUs: use --update-weight-transport auto"
        )
    needs = " or ".join(sorted({repr(transport.engine_needs) for transport in allowed}))
    raise ValueError(
        f"--update-weight-transport {wanted} needs engines that take {needs}; "
        f"these take {', '.join(sorted(offered))}: use --update-weight-transport auto"
    )
