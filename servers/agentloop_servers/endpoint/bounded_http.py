"""uvicorn's HTTP with a bound on what it does not bound itself: how long a request's headers may take, and how
large they may be. Bodies are the guard's matter (`http_guard.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_BYTES = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """One connection. It is closed where the headers of a request, the first one too, do not come in time."""

    def __init__(self, *args: Any, headers_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timeout_s = headers_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._num_bytes: int | None = 0  # of the headers so far; None between headers and the next request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What one read brings is bounded by the event loop, so that is the most there is beyond the bound.
        if self._num_bytes is not None:
            self._num_bytes += len(data)
            if self._num_bytes > HEADERS_BYTES and not self.transport.is_closing():
                self.send_400_response(f"Headers of more than {HEADERS_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._num_bytes is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._end_waiting()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        self._num_bytes = 0
        self._deadline = self.loop.call_later(self._headers_timeout_s, self.transport.close)

    def _end_waiting(self) -> None:
        self._num_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
