"""Routes of optional parts: a service includes every route that is registered."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter

from agentloop import parts
from agentloop.api.coordinator import FrontPort
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpLimits


@dataclass(frozen=True, slots=True)
class RouteContext:
    """The argument of a registered function, which returns an APIRouter.

    `keys` has the dependencies that ask for a user's or the admin's key.
    """

    coordinator: FrontPort
    keys: Keys
    limits: HttpLimits


def registered_routers(context: RouteContext) -> list[APIRouter]:
    """Return the routers of all registered routes. Raises InvalidRequest if one cannot be imported."""
    makers = [parts.load(parts.ROUTES, name, param="routes") for name in parts.registered(parts.ROUTES)]
    return [make(context) for make in makers]
