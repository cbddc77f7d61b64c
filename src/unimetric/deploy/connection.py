"""Connections of the server, with limits for the header of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Connection that is closed if the header of a request is not complete in time.

    uvicorn limits the time between two requests, and `Guard` that of a body. h11 limits the bytes of a header;
    the other parser of uvicorn does not.
    """

    timeout = 20.0  # longest time of a header, in seconds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._limit_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_header()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _limit_header(self) -> None:
        """Start the timer if a header is awaited, and stop it if there is one."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def configure(app: Any, *, timeout: float, **options: Any) -> uvicorn.Config:
    """Return the settings of uvicorn for the application of an index.

    Args:
        app: Application.
        timeout: Longest time in seconds of a header, and of running requests after a signal to stop.
        options: Other settings of uvicorn.
    """
    return uvicorn.Config(
        app,
        http=type("Connection", (Connection,), {"timeout": timeout}),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=1000,
        timeout_graceful_shutdown=int(timeout) + 1,
        **options,
    )
