"""Finds and reserves ports of this machine, and finds the address by which others reach it."""

from __future__ import annotations

import ipaddress
import socket

import psutil

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Libraries that choose a network interface by themselves, and how each is given the name of one; NCCL takes
# a name without "=" as the beginning of names.
_INTERFACE_OF = {GLOO_INTERFACE: "{}", NCCL_INTERFACE: "={}"}


def find_available_port(base_port: int = 0) -> int:
    """Return a port that was free a moment ago, searching upwards from `base_port` (0: the system's choice).

    Prefer binding to port 0 and reporting what was bound: this function cannot keep the port.
    """
    if base_port == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    for port in range(base_port, 65536):
        if is_port_available(port):
            return port
    raise OSError(f"no free port from {base_port} up")


def is_port_available(port: int, host: str = "") -> bool:
    """Return whether a server may listen there now. `host`: an address of this machine; empty: all."""
    with _bindable(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def hold_port(host: str, port: int = 0) -> socket.socket | None:
    """Reserve a port (0: any) for servers that start and stop there, until the returned socket is closed.

    The socket is bound and never listens: a server can still bind this port by its number, but the system
    does not choose it for others. None: the port is in use, or this system cannot reserve ports.
    """
    held = _bindable(host)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        return None
    if not is_port_available(held.getsockname()[1], host):
        held.close()
        return None
    return held


def _bindable(host: str) -> socket.socket:
    made = socket.socket(family_of(host))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def family_of(host: str) -> socket.AddressFamily:
    """Return the version of the Internet Protocol of an address; a name counts as version 4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int | str) -> str:
    """Return `host:port` as it stands in a URL, where an address of version 6 has brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address. A host name counts as reachable by others."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def get_host_info() -> tuple[str, str]:
    """Return the host name, and the address by which other machines reach this one (or loopback)."""
    return socket.gethostname(), address_towards("203.0.113.1")


def address_towards(host: str) -> str:
    """Return the address by which `host` reaches this machine; loopback if there is no route to it."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # nothing is sent: this asks the routing table for our address
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface that leads to `host`; None: it is not known.

    That of this machine's own address is the interface which has that address.
    """
    address = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def is_own(address: str) -> bool:
    """Return whether an interface of this machine has the address."""
    try:
        *_, (found, *_) = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return False
    return address_towards(address) == found


def interface_environment(address: str) -> dict[str, str]:
    """Return the environment with which process groups use the interface that has this host's `address`.

    By themselves, gloo takes the address of the machine's name, which may be loopback, and NCCL the first
    interface, which other hosts may not reach. Empty: `address` is loopback, or no interface is known.
    """
    interface = None if is_loopback(address) else interface_towards(address)
    return {name: form.format(interface) for name, form in _INTERFACE_OF.items()} if interface else {}
