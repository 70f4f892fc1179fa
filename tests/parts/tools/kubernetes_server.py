"""A fake cluster with agent-sandbox for the adapter: claims on a warm pool, and `exec` in their pods.

The claims are `extensions.agents.x-k8s.io/v1beta1` objects, and `exec` uses `v4.channel.k8s.io`. The pods are
bubblewrap's sandboxes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from aiohttp import WSMsgType, web

from agentloop_tools.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from agentloop_tools.sandbox.port import DEFAULT_LIMITS

TOKEN = "of-the-account"
POOL = "shells"
LIMITS = replace(DEFAULT_LIMITS, run_s=30.0, max_output_bytes=64 << 20)
CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/rl/sandboxclaims"
EXEC = "v4.channel.k8s.io"


class FakeCluster:
    """The API server. `claims` has the claims that are not deleted, `made` the specs of all claims."""

    def __init__(self, folder: Path) -> None:
        self.account = folder
        (folder / "token").write_text(f"{TOKEN}\n")
        self.made: list[dict] = []
        self.claims: dict[str, BubblewrapSandbox] = {}
        self._asked: set[str] = set()
        self._sandboxes = Bubblewrap()
        self.app = web.Application()
        self.app.router.add_post(CLAIMS, self.create)
        self.app.router.add_get(CLAIMS + "/{name}", self.get)
        self.app.router.add_delete(CLAIMS + "/{name}", self.delete)
        self.app.router.add_get("/api/v1/namespaces/rl/pods/{pod}/exec", self.exec)

    async def close(self) -> None:
        await self._sandboxes.close()

    async def create(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "status": "Failure", "message": "Unauthorized"}, status=401)
        claim = await request.json()
        assert (claim["apiVersion"], claim["kind"]) == ("extensions.agents.x-k8s.io/v1beta1", "SandboxClaim")
        self.made.append(claim["spec"])
        name = f"{claim['metadata']['generateName']}{len(self.made)}"
        self.claims[name] = await self._sandboxes.create()
        return web.json_response({**claim, "metadata": {"name": name}}, status=201)

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        pool = self.made[int(name.rpartition("-")[2]) - 1]["warmPoolRef"]["name"]
        condition = {"type": "Ready", "status": "False", "reason": "SandboxNotReady", "message": "Pod is Pending"}
        status: dict = {"conditions": [condition]}
        if pool != POOL:
            condition |= {"reason": "WarmPoolNotFound", "message": f"no warm pool {pool}"}
        elif name in self._asked:  # ready at the second poll
            condition |= {"status": "True", "reason": "DependenciesReady", "message": ""}
            status["sandbox"] = {"name": f"pod-of-{name}"}
        self._asked.add(name)
        return web.json_response({"metadata": {"name": name}, "status": status})

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.claims:
            return web.json_response({"kind": "Status", "status": "Failure", "message": "not found"}, status=404)
        await self.claims.pop(name).close()
        return web.json_response({"kind": "Status", "status": "Success"})

    async def exec(self, request: web.Request) -> web.StreamResponse:
        sandbox = self.claims.get(request.match_info["pod"].removeprefix("pod-of-"))
        if sandbox is None or request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "status": "Failure", "message": "not found"}, status=404)
        socket = web.WebSocketResponse(protocols=(EXEC,))
        await socket.prepare(request)
        program, given = request.query.getall("command"), b""
        if request.query["stdin"] == "true":
            wanted = re.match(r"head -c (\d+) ", program[2])
            assert wanted is not None
            while len(given) < int(wanted[1]):
                message = await socket.receive()
                assert message.type is WSMsgType.BINARY
                assert message.data[0] == 0
                given += message.data[1:]
        if program[-1] == "kill -9 -1":
            await sandbox.kill()
            code = 137
        elif program[0] == "mkdir":  # the folder exists
            code = 0
        else:
            ran = await sandbox.run(program, LIMITS, given)
            await socket.send_bytes(b"\1" + ran.output)
            code = ran.status
        end: dict = {"status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            end = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        await socket.send_bytes(b"\3" + json.dumps(end).encode())
        await socket.close()
        return socket
