"""The OpenAPI document: what FastAPI knows of the routes, and what the routes read by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_SCHEMA = "#/components/schemas/"
_PATH_PARAMETER = re.compile(r"\{([a-z_]+)\}")


def describe_bodies(app: FastAPI, title: str, description: str, bodies: Iterable[type[BaseModel]]) -> None:
    """Make `/openapi.json` complete: the bodies that `json_body` reads, and the keys."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=title, version=app.version, description=description, routes=app.routes)
            template = _SCHEMA + "{model}"
            _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
            components = schema.setdefault("components", {})
            _add_schemas(components.setdefault("schemas", {}), found["$defs"])
            _describe_path_parameters(schema["paths"])
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


def _add_schemas(schemas: dict[str, Any], bodies: dict[str, Any]) -> None:
    """Add the schemas of bodies to those of answers. A model may be in both, and then in two forms: what may be
    left out of a body is always in an answer."""
    text = orjson.dumps(bodies).decode()
    clashes = {name for name, schema in bodies.items() if schemas.get(name, schema) != schema}
    for name in clashes:
        text = text.replace(f'"{_SCHEMA}{name}"', f'"{_SCHEMA}{name}-Input"')
    schemas |= {f"{name}-Input" if name in clashes else name: one for name, one in orjson.loads(text).items()}


def _describe_path_parameters(paths: dict[str, Any]) -> None:
    """Add those that no handler declares: names of sessions, which `carriers.py` reads. Any text may stand
    there."""
    for path, operations in paths.items():
        for operation in operations.values():
            parameters = operation.setdefault("parameters", [])
            declared = {one["name"] for one in parameters if one["in"] == "path"}
            parameters += [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in _PATH_PARAMETER.findall(path)
                if name not in declared
            ]
