"""Models of a Hugging Face hub, from a local server with the hub's routes; and the errors of a hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "tiny_policy" / "v0"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
UNWANTED = ("pytorch_model.bin", "original/model.safetensors")
# The hub library reads HF_ENDPOINT when it is imported, so each call runs in a process.
RESOLVE = """
import sys
from agentloop.errors import InvalidRequest
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import ServiceConfig
try:
    config = with_model_folders(ServiceConfig(model=sys.argv[1]), lambda line: print(line, file=sys.stderr))
    print(config.model, config.served_name)
except InvalidRequest as error:
    print("refused:", error.message)
"""


class Hub(BaseHTTPRequestHandler):
    """A hub with `acme/tiny`, `acme/code` (no weights) and the gated `acme/gated`."""

    requested: list[str] = []  # noqa: RUF012 - shared by the requests of one server on purpose

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.requested.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] != ["api", "models"] and len(parts) < 5:
            self._answer(404, b"{}")  # not a download route
        elif parts[4:5] == ["tree"]:
            self._list("/".join(parts[2:4]))
        elif parts[0] == "api":
            self._describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        else:
            self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _files(self, name: str) -> dict[str, bytes]:
        files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
        if name == "acme/code":
            files = {"config.json": b"{}", "model.gguf": b""}
        return {**files, **dict.fromkeys(UNWANTED, b"unwanted")}

    def _describe(self, name: str, revision: str) -> None:
        if name == "acme/gated":
            return self._answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        if name not in ("acme/tiny", "acme/code"):
            return self._answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return self._answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": file} for file in self._files(name)]
        body = {"_id": "1", "id": name, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0}
        self._answer(200, json.dumps({**body, "siblings": siblings}).encode())

    def _list(self, name: str) -> None:
        files = self._files(name).items()
        tree = [{"type": "file", "path": path, "size": len(content), "oid": "0"} for path, content in files]
        self._answer(200, json.dumps(tree).encode())

    def _send_file(self, name: str, commit: str, file: str) -> None:
        content = self._files(name)[file]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self._answer(200, content, **{"X-Repo-Commit": commit, "ETag": etag})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.requested.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def resolve(endpoint: str, home: Path, given: str) -> tuple[str, str]:
    """Return the printed line and stderr."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, given],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_hub_id_is_downloaded_once_and_found_without_network(hub: str, tmp_path: Path) -> None:
    line, said = resolve(hub, tmp_path, "acme/tiny")
    folder, served_name = line.split()
    assert served_name == "acme/tiny"
    assert folder.endswith(COMMITS["main"])
    assert f"--model acme/tiny@{COMMITS['main']} pins it" in said
    read = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert read["tokenizer.json"] == (MODEL / "tokenizer.json").read_bytes()
    assert any(name.endswith(".safetensors") for name in read)
    assert not any(name in path for name in UNWANTED for path in Hub.requested)
    assert resolve("http://127.0.0.1:9", tmp_path, "acme/tiny")[0] == line


def test_a_revision_is_pinned(hub: str, tmp_path: Path) -> None:
    by_tag, said = resolve(hub, tmp_path, "acme/tiny@v1")
    assert by_tag.split()[0].endswith(COMMITS["v1"])
    assert f"acme/tiny@{COMMITS['v1']} pins it" in said
    assert resolve(hub, tmp_path, f"acme/tiny@{COMMITS['v1']}")[0] == by_tag


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("acme/other", "the hub has no such repository, or it is private (set HF_TOKEN)"),
        ("acme/tiny@v9", "the hub has no such revision"),
        ("acme/gated", "the hub requires its license to be accepted"),
        ("acme/code", "has no config.json or no safetensors: if it has a .gguf file"),
    ],
)
def test_a_hub_that_refuses_is_one_line(hub: str, tmp_path: Path, given: str, reason: str) -> None:
    line, _ = resolve(hub, tmp_path, given)
    assert line.startswith("refused:")
    assert reason in line
    assert "\n" not in line


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    line, _ = resolve("http://127.0.0.1:9", tmp_path, "acme/tiny")
    assert (
        "no model acme/tiny: it is not a folder here, and the hub cannot be reached and its cache has no copy"
        in line
    )
    assert "\n" not in line
