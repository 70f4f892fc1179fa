"""Routes of optional parts: a service includes every route that is registered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, Union

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, RootModel, Tag, create_model
from starlette.responses import Response

from agentloop import parts
from agentloop.api.coordinator import FrontPort
from agentloop.api.requests import GenerateBody
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpLimits
from agentloop_servers.ingress.admin import AdminRoutes

RouteSettings: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GenerateDialect:
    """Another form of the body of `POST /generate`: it has one of `fields` and no `token_ids`.

    `answer_schema` is the JSON schema of the responses that `answer` returns.
    """

    name: str
    fields: frozenset[str]
    body: type[BaseModel]
    answer: Callable[[Request, Any], Awaitable[Response]]
    answer_schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RouteContext:
    """The argument of a registered function, which returns an APIRouter.

    `keys` has the dependencies that require a user's or the admin's key. `token_calls` samples and scores without a
    record. `token_calls` and `endpoint` are None in a service without an endpoint for agents. A function may append
    to `generate_dialects`.
    """

    coordinator: FrontPort
    keys: Keys
    limits: HttpLimits
    admin: AdminRoutes
    endpoint: Endpoint | None
    token_calls: TokenCalls | None
    generate_dialects: list[GenerateDialect] = field(default_factory=list)


def registered_routers(context: RouteContext, settings: RouteSettings) -> list[APIRouter]:
    """Return the routers of all registered routes. Raises the errors of `registered_routes`."""
    return [make(context, **own) for make, own in registered_routes(settings)]


def registered_routes(settings: RouteSettings) -> list[tuple[Callable[..., APIRouter], dict[str, BaseModel]]]:
    """Return the function and the validated settings of every registered route.

    Raises InvalidRequest if a function cannot be imported or refuses its settings, or if no route has a name in
    `settings`.
    """
    names = dict.fromkeys((*parts.registered(parts.ROUTES), *settings))
    return [parts.configured(parts.ROUTES, name, settings.get(name, {}), param=f"routes.{name}") for name in names]


def generate_body(dialects: Collection[GenerateDialect]) -> type[RootModel[Any]]:
    """Return the model of the body of `POST /generate`: the service's own form or a dialect's."""

    def tag_of(value: Any) -> str:
        names = value.keys() if isinstance(value, Mapping) else frozenset[str]()
        found = (one.name for one in dialects if "token_ids" not in names and names & one.fields)
        return f"~{next(found, '')}"

    forms: Any = GenerateBody
    if dialects:
        tagged = [Annotated[one.body, Tag(f"~{one.name}")] for one in dialects]
        forms = Annotated[Union[Annotated[GenerateBody, Tag("~")], *tagged], Discriminator(tag_of)]

    about = "The body of `POST /generate`: with `token_ids`, or in the form of a registered dialect."
    return create_model("GenerateCallBody", __base__=RootModel[forms], __doc__=about)
