"""The viewer put together: within a service's app, or as one of its own over the files of a run."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from agentloop.api.coordinator import RecordsPort
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpGuard, HttpLimits, add_error_handlers
from agentloop_servers.viewer.pages import pages
from agentloop_servers.viewer.records import RecordRoutes, StoredRun, TokenLabels


def viewer_routers(
    records: RecordsPort, labels: TokenLabels, keys: Keys | None = None
) -> tuple[APIRouter, APIRouter]:
    """Return the routes of records, which with `keys` need one, and of the pages."""
    return RecordRoutes(records, labels, keys).router(), pages()


def viewer_app(stored: StoredRun, labels: TokenLabels) -> FastAPI:
    """Return the viewer of a stored run, for callers of this machine."""
    limits = HttpLimits()
    app = FastAPI(title="agentloop view", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, limits=limits, is_local_only=True)
    add_error_handlers(app, limits)
    for router in viewer_routers(stored, labels):
        app.include_router(router)
    return app
