"""Access control of the dashboard: loopback or a token, a token for every action, a strict CSP."""

import hmac
import secrets
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from slime.utils.browser_guard import is_known_host, names_of_this_machine
from slime.utils.http_utils import is_loopback

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server. `host`: the address that it binds. `token`: random for every server."""

    host: str
    token: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)

    @property
    def asks_everybody(self) -> bool:
        """Return whether reading requires the token, too, because other machines can connect."""
        return not is_loopback(self.host)

    def has_token(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {self.token}".encode())

    def known_host(self, request: web.Request) -> bool:
        """Reject foreign host names: a website could resolve its own name to loopback."""
        return self.asks_everybody or is_known_host(
            request.headers.get("Host", ""), names_of_this_machine([self.host])
        )

    def middleware(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self.known_host(request):
                raise web.HTTPForbidden(text="this address does not belong to the dashboard")
            acts = request.method not in ("GET", "HEAD")
            reads = request.path.startswith("/api/") and self.asks_everybody
            if (acts or reads) and not self.has_token(request):
                text = "a token is needed; it is in the file that `slime dashboard` named when it started"
                return web.json_response({"error": text}, status=401)
            try:
                response = await handler(request)
            except web.HTTPException as error:
                error.headers.update(_HEADERS)
                raise
            if not response.prepared:
                response.headers.update(_HEADERS)
            return response

        return guard
