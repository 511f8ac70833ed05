"""Refuses requests that foreign web pages send through a browser to servers on this machine.

A page of any site can send requests to loopback, but it cannot choose every header: browsers send the page's
origin, send JSON only after a preflight request, and put the name that they resolved into `Host`. Requests
with a foreign origin, a body that is not JSON, or a host name that is not this machine's are refused: a site
may point its own name to 127.0.0.1 (DNS rebinding). A plain address as host is accepted.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

ALLOWED_HOSTS_VARIABLE = "SLIME_ALLOWED_HOSTS"
_FROM_THIS_SITE = ("same-origin", "none")  # "none": somebody typed the address


def names_of_this_machine(more: Iterable[str] = ()) -> frozenset[str]:
    """Return the host names that requests may use: this machine's, those of the variable, and `more`."""
    own = socket.gethostname()
    given = os.environ.get(ALLOWED_HOSTS_VARIABLE, "").split(",")
    names = ("localhost", own, own.partition(".")[0], *given, *more)
    return frozenset(_plain(name) for name in names if name.strip())


def is_known_host(header: str, known: frozenset[str]) -> bool:
    """Return whether a `Host` header is one of `known`, an address, or below `localhost`."""
    name = _plain(header.partition("]")[0] if header.startswith("[") else header.rsplit(":", 1)[0])
    if name in known or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not name  # only HTTP/1.0 has no host, and browsers do not use it
    return True


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()


def token_guard(token: str, but: str | None = None) -> Middleware:
    """Return a middleware that requires the token of every request, except for the path `but`."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        is_open = but is not None and request.path.startswith(but)
        if not is_open and not secrets.compare_digest(given, f"Bearer {token}".encode()):
            return web.json_response({"error": "Unauthorized: a token is needed"}, status=401)
        return await handler(request)

    return guard


def browser_guard(*, known: frozenset[str] | None, json_only: bool = True) -> Middleware:
    """Return a middleware that refuses requests of web pages.

    `known` None: any host is accepted, since every request needs a token. `json_only` False: any body is.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = _refusal(request, known, json_only)
        if refused is not None:
            status, message = refused
            return web.json_response({"error": {"message": message}}, status=status)
        return await handler(request)

    return guard


def _refusal(request: web.Request, known: frozenset[str] | None, json_only: bool) -> tuple[int, str] | None:
    headers = request.headers
    host, origin = headers.get("Host", ""), headers.get("Origin")
    if known is not None and not is_known_host(host, known):
        return 403, (
            f"Host is {host[:100]!r}, which is no name of this machine. Use its address, or add the name to "
            f"{ALLOWED_HOSTS_VARIABLE} where the server is started."
        )
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return 403, f"Origin is {origin[:100]!r}: requests of web pages of other sites are refused."
    if headers.get("Sec-Fetch-Site", "none") not in _FROM_THIS_SITE:
        return 403, "Sec-Fetch-Site names another site: requests of web pages of other sites are refused."
    is_json = re.fullmatch(r"application/(.+\+)?json", request.content_type)
    if json_only and request.body_exists and not is_json:
        kind = headers.get("Content-Type", "missing")
        return 415, f"Content-Type is {kind[:100]}: send the body with Content-Type: application/json."
    return None
