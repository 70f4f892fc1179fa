"""A fake E2B provider for the adapter: one server implements the E2B API and the API of each sandbox.

It implements the protocol of the SDK e2b 2.63: `Sandbox.create`, `commands.run`, `files.read`, `files.write` and
`kill` run against it. The sandboxes are bubblewrap's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agentloop_tools.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from agentloop_tools.sandbox.port import DEFAULT_LIMITS

KEY = "e2b_key"
TOKEN = "of this sandbox"
VERSION = "0.5.8"
LIMITS = replace(DEFAULT_LIMITS, run_s=30.0, max_output_bytes=64 << 20)


class FakeE2B:
    """The provider. `made` has the bodies of requests for sandboxes, `open` the sandboxes by id."""

    def __init__(self) -> None:
        self.made: list[dict] = []
        self.open: dict[str, BubblewrapSandbox] = {}
        self._sandboxes = Bubblewrap()
        self.app = FastAPI()
        self.app.post("/sandboxes", status_code=201)(self.create)
        self.app.post("/v2/sandboxes", status_code=201)(self.create)  # routes that the SDK calls
        self.app.delete("/sandboxes/{name}", status_code=204)(self.delete)
        self.app.get("/health", status_code=204)(self.health)
        self.app.post("/process.Process/Start")(self.start)
        self.app.post("/files")(self.write)
        self.app.get("/files")(self.read)

    async def close(self) -> None:
        await self._sandboxes.close()

    async def create(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "invalid API key"}, 401)
        body = await request.json()
        if body["templateID"] != "base":
            return JSONResponse({"code": 404, "message": f"template '{body['templateID']}' not found"}, 404)
        self.made.append(body)
        name = f"i{len(self.made)}"
        self.open[name] = await self._sandboxes.create()
        answer = {"sandboxID": name, "templateID": "base", "clientID": "c", "envdVersion": VERSION}
        return JSONResponse({**answer, "envdAccessToken": TOKEN, "domain": None}, 201)

    async def delete(self, name: str) -> Response:
        if name not in self.open:
            return JSONResponse({"code": 404, "message": f"sandbox '{name}' not found"}, 404)
        await self.open.pop(name).close()
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        return Response(status_code=502 if self._sandbox(request) is None else 204)

    def _sandbox(self, request: Request) -> BubblewrapSandbox | None:
        assert request.headers["x-access-token"] == TOKEN
        return self.open.get(request.headers["e2b-sandbox-id"])

    async def start(self, request: Request) -> Response:
        if (sandbox := self._sandbox(request)) is None:
            return JSONResponse({"code": 502, "message": "The sandbox was not found"}, 502)
        body = await request.body()
        assert body[0] == 0
        assert len(body) == 5 + int.from_bytes(body[1:5], "big")
        program = json.loads(body[5:])["process"]
        user = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()

        async def events() -> AsyncIterator[bytes]:
            yield framed({"event": {"start": {"pid": 7}}})
            if "kill -9 -1" in program.get("args", []):
                await sandbox.kill()
                yield framed({"event": {"end": {"exitCode": -1, "status": "signal: killed"}}})
            elif user == "root:":  # everything that the adapter requests as root exists already
                yield framed({"event": {"end": {"exited": True, "status": "exit status 0"}}})
            else:
                ran = await sandbox.run([program["cmd"], *program.get("args", [])], LIMITS)
                if ran.output:
                    data = base64.b64encode(ran.output).decode()
                    yield framed({"event": {"data": {"stdout": data}}}) + framed({"event": {"keepalive": {}}})
                end = {"exitCode": ran.status, "exited": True, "status": f"exit status {ran.status}"}
                if ran.status == 137:
                    end = {"exitCode": -1, "status": "signal: killed"}
                yield framed({"event": {"end": end}})
            yield framed({}, flags=2)

        return StreamingResponse(events(), media_type="application/connect+json")

    async def write(self, request: Request, path: str, file: UploadFile | None = None) -> Response:
        sandbox = self._sandbox(request)
        assert sandbox is not None
        await sandbox.write(path, await (file.read() if file is not None else request.body()))
        return JSONResponse([{"name": path, "path": path, "type": "file"}])

    async def read(self, request: Request, path: str) -> Response:
        sandbox = self._sandbox(request)
        assert sandbox is not None
        return Response(await sandbox.read(path))


def framed(message: dict, flags: int = 0) -> bytes:
    """Return a message of Connect's streaming protocol."""
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data
