"""The OpenAPI document: FastAPI's own, plus the bodies and responses of routes that parse and serialize
themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.params import Depends
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from agentloop.api.openapi import SCHEMA_PREFIX, answer_schema, answer_schemas

STREAMED: Final[dict[str, Any]] = {"text/event-stream": {"schema": {"type": "string"}}}
"""The OpenAPI `content` of a streaming response, for routes that can stream in addition to JSON."""

OBJECT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The `responses` of a route that passes on another server's JSON object, documented by that server."""

_SECURED: Final[dict[str, Any]] = {"security": [{"bearer": []}, {"x-api-key": []}]}
_ERROR_NAME = "ErrorBody"
_ERROR = {
    "title": _ERROR_NAME,
    "description": "An error: `code` is stable and machine-readable, `param` names the invalid field.",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ERROR_SCHEMA: Final = {"$ref": f"{SCHEMA_PREFIX}{_ERROR_NAME}"}

_ERROR_STATUSES = (400, 401, 403, 404, 408, 409, 410, 413, 415, 429, 500, 502, 503, 504)
_bodies: dict[str, type[BaseModel]] = {}  # the request bodies of this process' routes, by class name
_PATH_PARAMETER = re.compile(r"\{([a-z_]+)\}")


def takes(body: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that needs a key and parses the request body `body`."""
    if body is None:
        return _SECURED
    _bodies[body.__name__] = body
    content = _json({"$ref": f"{SCHEMA_PREFIX}{body.__name__}"})
    return {**_SECURED, "requestBody": {"required": True, "content": content}}


def add_route(
    router: APIRouter,
    method: str,
    path: str,
    handler: Callable[..., Any],
    body: type[BaseModel] | None = None,
    answer: Any = None,
    responses: dict[int | str, dict[str, Any]] | None = None,
    dependencies: Sequence[Depends] | None = None,
) -> None:
    """Add a route that needs a key and parses its `body` itself. `answer` and `responses` describe its
    responses."""
    router.add_api_route(
        path,
        handler,
        methods=[method],
        response_model=answer,
        responses=responses,
        openapi_extra=takes(body),
        dependencies=dependencies,
    )


def answered(kind: Any, *others: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that returns a dataclass, a list of dataclasses, or one of the `others`."""
    schema = answer_schema(kind)
    return {200: {"content": _json({"anyOf": [schema, *others]} if others else schema)}}


def errors(schema: dict[str, Any] = ERROR_SCHEMA) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of routes whose error bodies have the schema `schema`."""
    return {status: {"content": _json(schema)} for status in _ERROR_STATUSES}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def describe(app: FastAPI) -> None:
    """Add the bodies of `add_route`, the responses, the errors and the key schemes to `/openapi.json`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            template = SCHEMA_PREFIX + "{model}"
            _, found = models_json_schema(
                [(body, "validation") for body in _bodies.values()], ref_template=template
            )
            components = schema.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            ours = {**answer_schemas(), _ERROR_NAME: _ERROR}
            assert all("enum" in ours[name] for name in ours.keys() & schemas.keys())  # enums are the same in both
            schemas |= ours
            _add_schemas(schemas, _with_key_patterns(found["$defs"]))
            _describe_path_parameters(schema["paths"])
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


def _add_schemas(schemas: dict[str, Any], bodies: dict[str, Any]) -> None:
    """Add the schemas of bodies to the schemas of responses. A model in both can differ: a field that is optional
    in a body is always present in a response. The body's schema is then named `<name>-Input`."""
    text = orjson.dumps(bodies).decode()
    clashes = {name for name, schema in bodies.items() if schemas.get(name, schema) != schema}
    for name in clashes:
        text = text.replace(f'"{SCHEMA_PREFIX}{name}"', f'"{SCHEMA_PREFIX}{name}-Input"')
    schemas |= {f"{name}-Input" if name in clashes else name: schema for name, schema in orjson.loads(text).items()}


def _with_key_patterns(schema: Any) -> Any:
    """Return a schema in which the pattern of an object's keys holds for all of its keys.

    For a dict with constrained keys pydantic writes `patternProperties`, which allows any value under other keys.
    """
    if isinstance(schema, list):
        return [_with_key_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _with_key_patterns(value) for key, value in schema.items()}
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) == 1 and "properties" not in schema:
        [(pattern, values)] = schema.pop("patternProperties").items()
        names = {**schema.get("propertyNames", {}), "pattern": pattern}
        schema |= {"propertyNames": names, "additionalProperties": values}
    return schema


def _describe_path_parameters(paths: dict[str, Any]) -> None:
    """Add path parameters that no handler declares, such as the session id that `auth.py` reads, as free text."""
    for path, operations in paths.items():
        for operation in operations.values():
            parameters = operation.setdefault("parameters", [])
            declared = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
            parameters += [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in _PATH_PARAMETER.findall(path)
                if name not in declared
            ]
