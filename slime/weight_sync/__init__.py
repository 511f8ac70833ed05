"""Ways to bring named weights from the trainer to the engines, one transport per file."""

from slime.weight_sync.base import LiveReport, LiveSender, Sender, Site, Target, Transport, WeightBundle
from slime.weight_sync.transports import (
    choose_adapter_transport,
    choose_transport,
    live_sender_of,
    transport_of,
)

__all__ = [
    "LiveReport",
    "LiveSender",
    "Sender",
    "Site",
    "Target",
    "Transport",
    "WeightBundle",
    "choose_adapter_transport",
    "choose_transport",
    "live_sender_of",
    "transport_of",
]
