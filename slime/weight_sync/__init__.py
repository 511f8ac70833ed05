"""Ways to bring named weights from the trainer to the engines, one transport per file."""

from slime.weight_sync.base import LiveReport, LiveSender, Parcel, Sender, Site, Target, Transport
from slime.weight_sync.transports import LIVE_TRANSPORTS, TRANSPORTS, choose_transport

__all__ = [
    "LIVE_TRANSPORTS",
    "TRANSPORTS",
    "LiveReport",
    "LiveSender",
    "Parcel",
    "Sender",
    "Site",
    "Target",
    "Transport",
    "choose_transport",
]
