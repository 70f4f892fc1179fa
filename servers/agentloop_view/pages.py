"""The viewer's pages: static files of this package, without a build step. They contain no data; the data needs a
key.

Texts from a model, a tool or a user are inserted as text nodes. The content security policy allows only scripts and
styles from these files.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from agentloop_servers.ingress.routes import RouteContext

PAGES_FOLDER = Path(__file__).parent / "static"

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def pages(context: RouteContext | None = None) -> APIRouter:
    """Return the routes of `/ui/`, which do not depend on the service."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/ui", lambda: RedirectResponse("ui/"), methods=["GET"], response_model=None)
    for file in sorted(PAGES_FOLDER.iterdir()):
        if file.suffix in _TYPES:
            path = "" if file.name == "index.html" else file.name
            router.add_api_route(f"/ui/{path}", _answer(file), methods=["GET"], response_model=None)
    return router


def _answer(file: Path) -> Any:
    content = file.read_bytes()
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"', "vary": "accept-encoding"}
    packed = gzip.compress(content, mtime=0)
    respond = partial(Response, media_type=_TYPES[file.suffix])

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return respond(packed, headers={**headers, "content-encoding": "gzip"})
        return respond(content, headers=headers)

    return answer
