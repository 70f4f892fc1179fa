"""The viewer application for the files of a run, without a service. A service includes the same routes."""

from __future__ import annotations

from fastapi import FastAPI

from agentloop_servers.http.guard import HttpGuard, HttpLimits, add_error_handlers
from agentloop_servers.ingress.records import RecordRoutes, TokenLabels
from agentloop_view.pages import pages
from agentloop_view.stored_run import StoredRun


def viewer_app(stored: StoredRun, labels: TokenLabels) -> FastAPI:
    """Return the viewer application of a stored run. It accepts requests from this machine only."""
    limits = HttpLimits()
    app = FastAPI(title="agentloop view", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, limits=limits, is_local_only=True)
    add_error_handlers(app, limits)
    app.include_router(RecordRoutes(stored, labels).router())
    app.include_router(pages())
    return app
