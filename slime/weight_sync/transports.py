"""Chooses the transport of a run, and loads the code of its row in the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slime.catalog.transports import TRANSPORTS, TransportRow
from slime.utils.misc import load_function
from slime.weight_sync.base import LiveSender, SenderOptions, Site, Transport


def transport_of(name: str) -> Transport:
    """Return a transport that publishes bundles."""
    assert not TRANSPORTS[name].live, f"{name} publishes no bundle"
    transport: Transport = load_function(TRANSPORTS[name].code)
    return transport


def live_sender_of(name: str) -> Callable[[SenderOptions], LiveSender]:
    """Return the factory of senders of a live transport, for which engines pause."""
    assert TRANSPORTS[name].live, f"{name} is fetched by engines, not sent"
    make_sender: Callable[[SenderOptions], LiveSender] = load_function(TRANSPORTS[name].code)
    return make_sender


def choose_transport(
    wanted: str, offered: Iterable[str], site: Site | None = None, mode: str = "full"
) -> str:
    """Return the first transport that the flags allow, every engine supports and the placement permits."""
    offered, site = set(offered), site or Site()
    allowed = {
        name: row
        for name, row in _in_order(site, "model").items()
        if row.mode == mode and wanted in ("auto", row.choice)
    }
    taken = {name: row for name, row in allowed.items() if row.engine_needs in offered}
    for name, row in taken.items():
        # A transport that relies on shared GPUs needs a trainer rank on each.
        shares = site.cuda and site.colocated and (site.every_gpu_trains or not row.on_shared_gpus)
        if row.on_shared_gpus in (None, shares):
            return name
    if taken:
        raise ValueError(
            f"--update-weight-transport {wanted} does not work between a trainer and engines on the same "
            "GPUs: use --update-weight-transport auto"
        )
    needs = " or ".join(sorted({repr(row.engine_needs) for row in allowed.values()}))
    raise ValueError(
        f"--update-weight-transport {wanted} needs engines that take {needs}; "
        f"these take {', '.join(sorted(offered))}: use --update-weight-transport auto"
    )


def choose_adapter_transport(offered: Iterable[str]) -> str:
    """Choose the transport of adapters among the transports that the engines offer."""
    offered = set(offered)
    for name, row in _in_order(Site(), "adapter").items():
        if row.engine_needs in offered:
            return name
    raise ValueError(
        "--lora-sync adapter needs engines that take adapters (the embedded engine, or SGLang 0.5.23 or "
        f"later started with --enable-lora); these take {', '.join(sorted(offered))}: use --lora-sync merged"
    )


def _in_order(site: Site, content: str) -> dict[str, TransportRow]:
    """Return the rows that can work on such machines, fastest first."""
    places = {
        name: row.order_on_cuda if site.cuda else row.order_on_cpu
        for name, row in TRANSPORTS.items()
        if row.content == content
    }
    known = {name: place for name, place in places.items() if place is not None}
    return {name: TRANSPORTS[name] for name in sorted(known, key=known.__getitem__)}
