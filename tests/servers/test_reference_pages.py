"""`python -m tests.servers.test_reference_pages` writes `docs/reference/cli.md` and `docs/reference/http.md`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from agentloop import parts
from agentloop_servers.cli import load
from agentloop_servers.cli.commands import COMMANDS, OF_PARTS
from agentloop_servers.http.auth import Keys
from tests.servers.http.test_openapi import SPEC, chat_service

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
REWRITE = "python -m tests.servers.test_reference_pages"
CLI_HEAD = """# Command line

Every command of `agentloop` with its options, for users of the terminal. The page is generated from the commands.

Exit codes: 0 success; 1 an error, lost trajectories or a broken requirement; 2 wrong usage; 130 Ctrl-C;
143 SIGTERM.
"""
HTTP_HEAD = """# HTTP API

Every route of the service, for authors of clients and trainers. The page is generated from the OpenAPI document,
which a running service returns at `GET /openapi.json` with the schemas of all bodies and answers. Many routes also
exist with the prefix `/sessions/{session_id}`; without it the body names the session, or the call is not recorded.
Errors have the shape `{"error": {"message", "type", "param", "code"}}`.
"""


def cli_page() -> str:
    """Return the page of the command line."""
    sections = [CLI_HEAD]
    for name, help_line in {**{name: line for name, (_, line) in COMMANDS.items()}, **OF_PARTS}.items():
        app = load(COMMANDS[name][0]).app if name in COMMANDS else parts.load(parts.COMMANDS, name, param="command")
        command = typer.main.get_group(app).commands[name]
        sections.append(f"## `agentloop {name}`\n\n{help_line}\n")
        sections += _command(command, f"agentloop {name}")
    return "\n".join(sections)


def _command(command: Any, path: str) -> Iterator[str]:
    for name, inner in getattr(command, "commands", {}).items():
        yield f"### `{path} {name}`\n\n{inner.help or ''}\n"
        yield from _command(inner, f"{path} {name}")
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""])


def _row(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if not is_option:
        names = f"`{parameter.name.upper()}`"
    default = parameter.default
    shown = "required" if parameter.required else ""
    if default is not None and not callable(default) and default is not False and default != ():
        shown = f"`{default}`"
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {names} | {shown} | {meaning} |"


def http_page(document: dict[str, Any]) -> str:
    """Return the page of the routes in an OpenAPI document."""
    by_tag: dict[str, dict[tuple[str, str], str]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = schema.get("schema", {}).get("$ref", "").rpartition("/")[2]
            about = re.sub(r"\s+", " ", operation.get("description") or operation["summary"]).replace("|", "\\|")
            session = re.sub(r"^/sessions/\{session_id\}(?=/(v1|inference|generate))", "", path)
            rows = by_tag.setdefault(operation["tags"][0], {})
            rows.setdefault((method.upper(), session), f"{f'`{body}`' if body else ''} | {about}")
    sections = [HTTP_HEAD]
    for tag, rows in by_tag.items():
        table = [f"| `{method} {path}` | {row} |" for (method, path), row in rows.items()]
        sections.append("\n".join([f"## {tag}\n", "| route | body | meaning |", "|---|---|---|", *table, ""]))
    return "\n".join(sections)


async def _document(folder: Path) -> dict[str, Any]:
    spec = replace(SPEC, max_context_tokens=128)
    async with chat_service(folder, keys=Keys.of(["user-1"], "admin-1"), spec=spec) as service:
        _, document, _ = await service.call("GET", "/openapi.json")
    return document


def test_the_page_of_the_command_line_is_current() -> None:
    assert (REFERENCE / "cli.md").read_text() == cli_page(), REWRITE


async def test_the_page_of_the_routes_is_current(tmp_path: Path) -> None:
    assert (REFERENCE / "http.md").read_text() == http_page(await _document(tmp_path)), REWRITE


def test_every_command_for_a_service_takes_its_url_from_the_environment() -> None:
    urls = []
    for name, (module, _) in COMMANDS.items():
        pending = [typer.main.get_group(load(module).app).commands[name]]
        while pending:
            command = pending.pop()
            pending += getattr(command, "commands", {}).values()
            urls += [one.envvar for one in command.params if one.name == "url"]
    assert len(urls) >= 12
    assert set(urls) == {"AGENTLOOP_URL"}


def test_the_public_names_have_docstrings() -> None:
    blocks = re.findall(r"^::: (\S+)\n(.*?)(?=^#|^:::|\Z)", (REFERENCE / "python.md").read_text(), re.M | re.S)
    assert len(blocks) >= 6
    for module_name, options in blocks:
        module = importlib.import_module(module_name)
        members = re.search(r"members: \[(.*)\]", options)
        names = members[1].split(", ") if members else getattr(module, "__all__", [])
        assert inspect.getdoc(module)
        for name in names:
            public = getattr(module, name)
            if not (inspect.isclass(public) or inspect.isfunction(public)):
                continue  # an alias of a type
            assert inspect.getdoc(public), f"{module_name}.{name}"
            methods = inspect.getmembers(public, inspect.isfunction) if inspect.isclass(public) else []
            assert [one for one, method in methods if one[0] != "_" and not inspect.getdoc(method)] == [], name


if __name__ == "__main__":
    (REFERENCE / "cli.md").write_text(cli_page())
    with TemporaryDirectory() as folder:
        (REFERENCE / "http.md").write_text(http_page(asyncio.run(_document(Path(folder)))))
