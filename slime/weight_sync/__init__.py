"""Ways to bring named weights from the trainer to the engines, one transport per file."""

from slime.weight_sync.base import Parcel, Sender, Transport
from slime.weight_sync.transports import TRANSPORTS, choose_transport

__all__ = ["TRANSPORTS", "Parcel", "Sender", "Transport", "choose_transport"]
