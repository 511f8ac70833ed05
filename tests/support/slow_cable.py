"""A cable between two network interfaces that delays every frame, and loses some: for kernels without netem.

    python tests/support/slow_cable.py eth0 c0 0.05 0.01

Checksums and segments must be made by the hosts' kernels for it, not by their network cards:

    python tests/support/slow_cable.py plain eth0
"""

import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO
_EVERY_PROTOCOL = 3


def send_plain_frames(interface: str) -> None:
    """Switch off what a card does later: checksums, and cutting large segments into frames."""
    import ctypes

    with socket.socket() as any_socket:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def connect(first: str, second: str, delay_s: float, loss: float) -> None:
    """Pass frames both ways for ever."""
    ends = []
    for name in (first, second):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        end.bind((name, 0))
        ends.append(end)
    waiting: list[tuple[float, int, int, bytes]] = []
    number, draw = 0, random.Random(0)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], pause)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(1 << 16)
            if kind != socket.PACKET_OUTGOING and draw.random() >= loss:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, 1 - ends.index(end), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            ends[to].send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        send_plain_frames(sys.argv[2])
    else:
        connect(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
