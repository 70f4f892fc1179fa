"""The page at `/docs`: all routes and schemas of the document, and nothing that a browser would fetch."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from agentloop_servers.http.docs_page import docs_page
from tests.support.endpoint.chat_service import chat_service


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.ids |= {value for name, value in attrs if name == "id" and value}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


async def test_it_shows_every_route_and_schema_offline(tmp_path):
    async with chat_service(tmp_path) as service:
        document = (await service.call("GET", "/openapi.json"))[1]
        async with service.http.get(f"{service.url}/docs") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            written = await answer.text()
    page = Page()
    page.feed(written)
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert page.ids == set(document["components"]["schemas"])
    text = "".join(page.text)
    assert all(path in text for path in document["paths"])
    assert re.search(r"top_p\s*number", text)


def test_what_a_document_says_is_text():
    hostile = "<script>alert(1)</script>"
    route = {"description": hostile, "parameters": [{"name": hostile, "in": "query", "schema": {"type": hostile}}]}
    schema = {"description": hostile, "properties": {hostile: {"enum": [hostile], "description": hostile}}}
    document = {
        "info": {"title": hostile, "description": hostile},
        "paths": {f"/{hostile}": {"get": {**route, "tags": [hostile]}}},
        "components": {"schemas": {"A": schema}},
    }
    page = Page()
    page.feed(docs_page(document))
    assert "script" not in page.tags
    assert "".join(page.text).count(hostile) >= 10
