"""What an app needs because it stands behind Serve's proxy."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REQUEST_ID = "x-request-id"


class BehindServe:
    """The app as Serve is given it. Serve's proxy gives every request an id, and stamps the answer with it: stamped
    by the app too, clients would read `id, id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unstamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[_REQUEST_ID]
            await send(message)

        await self._app(scope, receive, unstamped)
