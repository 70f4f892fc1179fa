"""A route with settings."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from agentloop_servers.ingress.routes import RouteContext


class Greeting(BaseModel, extra="forbid"):
    text: str = "hello"


def hello(context: RouteContext, settings: Greeting) -> APIRouter:
    router = APIRouter(dependencies=[Depends(context.keys.require_user)])
    router.add_api_route("/hello", lambda: settings.text)
    return router


hello.Settings = Greeting
