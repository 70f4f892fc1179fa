"""Sandboxes of Kubernetes' agent-sandbox: a claim takes a pod out of a warm pool, and commands run in it by `exec`.

A `SandboxClaim` (`extensions.agents.x-k8s.io/v1beta1`) names a pool of the namespace, and is deleted with its
sandbox, at the latest after `max_life_s`, which holds for a killed worker too. The service account may create, get
and delete claims, and `create` and `get` `pods/exec`.

Isolation it gives: that of the pool's template, such as gVisor or Kata with a network policy. Memory, processes and
disk are the template's; of our limits those of time and output hold. Its first container needs a shell, tar and a
writable `/task`.

Tested against a server of our own that speaks this protocol; not in a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp

from agentloop.errors import InvalidRequest, ToolLost
from agentloop_tools.sandbox.commands import CommandSandbox, Printed, answer, fed
from agentloop_tools.sandbox.http import ServiceSandboxes
from agentloop_tools.sandbox.port import FOLDER, SandboxLimits, SandboxSource

_CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxclaims"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ASK_S = 0.2  # between two questions whether a claim is ready
_EXEC = "v4.channel.k8s.io"
_OUTPUTS, _END = (1, 2), 3  # its channels


class Kubernetes(ServiceSandboxes):
    """Sandboxes of a cluster."""

    def __init__(
        self,
        *,
        pool: str,
        namespace: str = "default",
        api_url: str = "https://kubernetes.default.svc",
        account: str | Path = _ACCOUNT,
        ready_s: float = 300.0,
        max_life_s: float = 3600.0,
    ) -> None:
        """`pool` is the warm pool of a source without an image, which names another. `account` is a folder with
        `token` and `ca.crt`, as a pod has it; `ready_s` bounds the wait for a claim."""
        super().__init__("the cluster", api_url)
        self._pool = pool
        self._claims = _CLAIMS.format(namespace=namespace)
        self._ready_s = ready_s
        self._max_life_s = max_life_s
        self._account = Path(account)
        self._pods = f"/api/v1/namespaces/{namespace}/pods"

    def connector(self) -> aiohttp.BaseConnector:
        authority = self._account / "ca.crt"
        trusted = ssl.create_default_context(cafile=authority if authority.is_file() else None)
        return aiohttp.TCPConnector(ssl=trusted, limit=0)

    def headers(self) -> dict[str, str]:
        """Return the account's token, which the cluster renews in its file."""
        return {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        return await super().ask(method, path, headers=self.headers(), **options)

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> KubernetesSandbox:
        if source.network is not None:
            raise InvalidRequest("the network of a pool is that of its template", param="network")
        ends_at = datetime.now(UTC) + timedelta(seconds=self._max_life_s)
        lifecycle = {"shutdownTime": ends_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        claim = {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": {"generateName": "agentloop-"},
            "spec": {"warmPoolRef": {"name": source.image or self._pool}, "lifecycle": lifecycle},
        }
        made = await self.ask("POST", self._claims, json=claim)
        return KubernetesSandbox(self, source, limits, claim=f"{self._claims}/{made['metadata']['name']}")

    async def ready(self, claim: str) -> str:
        """Return the path of a claim's pod, once it is ready. Raises ToolLost with what the cluster says."""
        said = "nothing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._ready_s):
                while True:
                    status: dict[str, Any] = (await self.ask("GET", claim)).get("status") or {}
                    conditions = {one["type"]: one for one in status.get("conditions") or ()}
                    ready: dict[str, Any] = conditions.get("Ready", {})
                    if ready.get("status") == "True":
                        return f"{self._pods}/{status['sandbox']['name']}"
                    said = f"{ready.get('reason', 'nothing')} {ready.get('message', '')}".strip()
                    await asyncio.sleep(_ASK_S)
        name = claim.rpartition("/")[2]
        raise ToolLost(f"claim {name} was not ready in {self._ready_s:g} s: {said[:300]}")


class KubernetesSandbox(CommandSandbox):
    """A claimed pod."""

    def __init__(self, maker: Kubernetes, source: SandboxSource, limits: SandboxLimits, *, claim: str) -> None:
        super().__init__(maker, source, limits)
        self._cluster = maker
        self._claim = claim
        self._pod = ""  # the path, once the claim has it

    async def begin(self) -> None:
        self._pod = await self._cluster.ready(self._claim)
        answer(await self.run(["mkdir", "-p", FOLDER], self._limits))

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        asked = [("stdin", str(bool(given)).lower()), ("stdout", "true"), ("stderr", "true")]
        asked += [("command", word) for word in fed(program, given)]
        path, headers = f"{self._pod}/exec", self._cluster.headers()
        async with (
            self._cluster.http() as http,
            http.ws_connect(path, params=asked, headers=headers, protocols=[_EXEC], max_msg_size=0) as ws,
        ):
            for start in range(0, len(given), 1 << 16):
                await ws.send_bytes(b"\0" + given[start : start + (1 << 16)])
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                if message.data[0] in _OUTPUTS:
                    printed.add(message.data[1:])
                elif message.data[0] == _END:
                    return _status(json.loads(message.data[1:]))
        raise ToolLost("the pod ended before its command")

    async def remove(self) -> None:
        await self._cluster.delete(self._claim)


def _status(end: dict[str, Any]) -> int:
    """Return the exit status that the last message of `exec` tells. Raises ToolLost for any other failure."""
    if end.get("status") == "Success":
        return 0
    causes = (end.get("details") or {}).get("causes") or ()
    code = next((one["message"] for one in causes if one.get("reason") == "ExitCode"), None)
    if code is None:
        raise ToolLost(f"the pod runs nothing: {end.get('message', '')[:300]}")
    return int(code)
