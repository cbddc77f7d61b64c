"""Checks and headers of every request: host, origin, token, time of the body, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import cookie_parser

COOKIE = "unimetric_token"
#: Paths that show nothing of the index.
_PUBLIC = ("/", "/healthz", "/token", "/favicon.ico")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class SlowClient(Exception):
    """The body of a request did not arrive in time."""


def cookie_of(token: str) -> str:
    """Return the value of the cookie of a token, from which the token cannot be computed."""
    return hmac.new(token.encode(), b"unimetric serve", hashlib.sha256).hexdigest()


class Guard:
    """ASGI middleware around the server.

    Without a token, only requests that name an allowed host are answered, so that no web page reaches the server by a name of its
    choice that resolves to this machine.

    Args:
        app: Application.
        token: Token that requests must have; empty for none.
        hosts: Names in the header `Host` that are allowed without a token.
        origins: Origins whose pages may send requests, besides that of the server. The application must answer their preflights (CORS).
        upload: Largest body of a request in bytes, as its header declares it.
        timeout: Longest time in seconds for the body of a request.
        observe: Callback with the scope, status and seconds of each request.
    """

    def __init__(
        self,
        app: Any,
        *,
        token: str,
        hosts: Sequence[str],
        origins: Sequence[str],
        upload: int,
        timeout: float,
        observe: Callable[[Any, int, float], None],
    ) -> None:
        self.app, self.token, self.hosts, self.origins = app, token.encode(), frozenset(hosts), frozenset(origins)
        self.upload, self.timeout, self.observe = upload, timeout, observe
        self.cookie = cookie_of(token).encode() if token else b""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn sends no body for it
            scope = scope | {"method": "GET"}
        begun, status = time.perf_counter(), 500
        started = False
        headers = {name.lower(): value for name, value in scope["headers"]}
        added = list(_HEADERS)
        if headers.get(b"origin", b"").decode("latin-1") in self.origins:  # its pages can read rejections, too
            added += [(b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"Origin")]

        async def send_with_headers(message: Any) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                names = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((name, value) for name, value in added if name not in names)]
            await send(message)

        try:
            rejection = self._check(scope["method"], scope["path"], headers)
            if rejection is not None:
                await _answer(send_with_headers, *rejection)
            else:
                await self.app(scope, self._limited(receive), send_with_headers)
        except SlowClient:
            if not started:
                await _answer(
                    send_with_headers, 408, "the body of the request did not arrive in time", "send it faster, or send a smaller one"
                )
        finally:
            self.observe(scope, status, time.perf_counter() - begun)

    def _check(self, method: str, path: str, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        """Return status, problem and hint of a request that is not allowed."""
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not self.token and name not in self.hosts:
            return (
                403,
                f"requests for the host `{name}` are not allowed",
                "use the address that `unimetric serve` has printed, or `--token-file`",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self.origins and origin.partition("://")[2] != host:
            return 403, f"requests from pages of `{origin}` are not allowed", "start the server with `--cors ORIGIN`"
        # Browsers send it without the token. CORSMiddleware answers it, and no route is called.
        preflight = method == "OPTIONS" and b"access-control-request-method" in headers and origin in self.origins
        public = preflight or path in _PUBLIC or path.startswith("/page/")
        if self.token and not public and not self._has_token(headers):
            return 401, "a token is required", "send the header `Authorization: Bearer TOKEN`"
        length = headers.get(b"content-length", b"")[:20]
        if length.isdigit() and int(length) > self.upload:
            return 413, f"a request must have at most {self.upload:,} bytes, got {int(length):,}", "send a smaller image"
        return None

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token):
            return True
        # `SimpleCookie` reads nothing if a cookie of another server of this host has a character that it does not expect.
        found = cookie_parser(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE, "")
        return hmac.compare_digest(found.encode("latin-1"), self.cookie)

    def _limited(self, receive: Receive) -> Receive:
        end = asyncio.get_running_loop().time() + self.timeout
        complete = False

        async def receive_in_time() -> Any:
            nonlocal complete
            if complete:  # what follows is the news that the client has gone, whenever that is
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(end - asyncio.get_running_loop().time(), 0.001))
            except TimeoutError:
                raise SlowClient from None
            complete = message["type"] != "http.request" or not message.get("more_body")
            return message

        return receive_in_time


async def _answer(send: Send, status: int, problem: str, hint: str) -> None:
    body = json.dumps({"error": problem, "hint": hint}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 408:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
