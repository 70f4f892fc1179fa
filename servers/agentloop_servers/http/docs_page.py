"""The OpenAPI document as one page of HTML: no script, nothing from elsewhere, so it can be read offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

DOCS_PATH = "/docs"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
code { font-family: ui-monospace, monospace } h2 { margin-top: 2.5rem } summary { cursor: pointer }
table { border-collapse: collapse; margin: .5rem 0 1rem } td { padding: .1rem 1rem .1rem 0; vertical-align: top }
details { border-top: 1px solid #8884; padding: .3rem 0 } .method { display: inline-block; width: 5rem }
"""


def add_docs_page(app: FastAPI) -> None:
    """Serve the page at `DOCS_PATH`. It is written once, when it is first asked for."""
    page: list[str] = []

    async def docs(request: Request) -> Response:
        if not page:
            page.append(docs_page(app.openapi()))
        return HTMLResponse(page[0], headers={"content-security-policy": _POLICY})

    app.add_route(DOCS_PATH, docs, include_in_schema=False)


def docs_page(document: Mapping[str, Any]) -> str:
    """Write an OpenAPI document as HTML: routes by their tags, then the schemas that they name."""
    info = document["info"]
    head = f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>"
    body = "".join([*_routes(document["paths"]), *_schemas(document.get("components", {}).get("schemas", {}))])
    intro = f"<h1>{escape(info['title'])}</h1><p>{escape(info.get('description', ''))}</p>"
    link = '<p>For programs: <a href="openapi.json">openapi.json</a></p>'
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<body>{intro}{link}{body}</body></html>'


def _routes(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["service"])[0]
            by_tag.setdefault(tag, []).append(_route(method, path, operation))
    for tag, routes in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(routes)}"


def _route(method: str, path: str, operation: Mapping[str, Any]) -> str:
    name = f'<span class="method"><code>{escape(method.upper())}</code></span> <code>{escape(path)}</code>'
    rows = [
        (one["name"], f"{one['in']}, {_kind(one.get('schema', {}))}", one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {})
    rows += [("body", f"{media}, {_kind(content.get('schema', {}))}", "") for media, content in body.items()]
    for status, response in operation.get("responses", {}).items():
        if status.startswith("2"):
            rows += [
                ("answer", f"{media}, {_kind(content.get('schema', {}))}", "")
                for media, content in response.get("content", {}).items()
            ]
    text = escape(operation.get("description", "")).replace("\n\n", "<br>")
    return f"<details><summary>{name}</summary><p>{text}</p>{_table(rows)}</details>"


def _schemas(schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(schemas.items()):
        required = schema.get("required", ())
        rows = [
            (field, _kind(one) + (", required" if field in required else ""), one.get("description", ""))
            for field, one in schema.get("properties", {}).items()
        ]
        text = escape(schema.get("description", ""))
        kind = "" if rows else f"<p>{_kind(schema)}</p>"
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{text}</p>{kind}{_table(rows)}'


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Write rows of a name, a kind that is HTML already, and a text."""
    cells = (f"<tr><td><code>{escape(a)}</code><td>{b}<td>{escape(c)}" for a, b, c in rows)
    return f"<table>{''.join(cells)}</table>" if rows else ""


def _kind(schema: Mapping[str, Any]) -> str:
    """Name the values that a schema takes, in one line of HTML."""
    if (reference := schema.get("$ref")) is not None:
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[word]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        return f"list of {', '.join(_kind(one) for one in items)}"
    bounds = {"minimum": "at least", "maximum": "at most", "maxLength": "of at most", "pattern": "like"}
    words = [f"{text} {escape(str(schema[key]))}" for key, text in bounds.items() if key in schema]
    return ", ".join([escape(str(schema.get("type", "any"))), *words])
