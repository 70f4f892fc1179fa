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
from agentloop_tools.sandbox.http import SandboxService, ServiceSandboxes
from agentloop_tools.sandbox.port import FOLDER, SandboxLimits, SandboxSource

_CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxclaims"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ASK_S = 0.2  # between two questions whether a claim is ready
_OUTPUTS, _END = (1, 2), 3  # channels of `exec`


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
        super().__init__(SandboxService("the cluster", api_url, self._connector))
        self._pool = pool
        self._claims = _CLAIMS.format(namespace=namespace)
        self._ready_s = ready_s
        self._max_life_s = max_life_s
        self._account = Path(account)
        self.pods = f"/api/v1/namespaces/{namespace}/pods"

    def _connector(self) -> aiohttp.BaseConnector:
        authority = self._account / "ca.crt"
        return aiohttp.TCPConnector(
            ssl=ssl.create_default_context(cafile=authority if authority.is_file() else None), limit=0
        )

    def headers(self) -> dict[str, str]:
        """Return the account's token, which the cluster renews in its file."""
        return {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}

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
        made = await self.service.ask("POST", self._claims, headers=self.headers(), json=claim)
        return KubernetesSandbox(self, source, limits, name=str(made["metadata"]["name"]))

    async def ready(self, name: str) -> str:
        """Return the pod of a claim, which has its sandbox's name. Raises ToolLost with what the cluster says."""
        said = "nothing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._ready_s):
                while True:
                    claim = await self.service.ask("GET", f"{self._claims}/{name}", headers=self.headers())
                    status: dict[str, Any] = claim.get("status") or {}
                    ready: dict[str, Any] = next(
                        (one for one in status.get("conditions") or () if one["type"] == "Ready"), {}
                    )
                    if ready.get("status") == "True":
                        return str(status["sandbox"]["name"])
                    said = f"{ready.get('reason', 'nothing')} {ready.get('message', '')}".strip()
                    await asyncio.sleep(_ASK_S)
        raise ToolLost(f"claim {name} was not ready in {self._ready_s:g} s: {said[:300]}")

    async def delete(self, name: str) -> None:
        """Delete a claim and with it its sandbox. A claim that is already deleted is no error."""
        with contextlib.suppress(ToolLost):  # its life is bounded
            await self.service.ask("DELETE", f"{self._claims}/{name}", headers=self.headers())


class KubernetesSandbox(CommandSandbox):
    """A claimed pod."""

    def __init__(self, maker: Kubernetes, source: SandboxSource, limits: SandboxLimits, *, name: str) -> None:
        super().__init__(maker, source, limits)
        self._cluster = maker
        self._name = name
        self._exec = ""  # the path, once the claim has its pod

    async def begin(self) -> None:
        self._exec = f"{self._cluster.pods}/{await self._cluster.ready(self._name)}/exec"
        answer(await self.run(["mkdir", "-p", FOLDER], self._limits))

    async def perform(
        self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed
    ) -> tuple[int, str | None]:
        asked = [("stdin", str(bool(given)).lower()), ("stdout", "true"), ("stderr", "true")]
        asked += [("command", word) for word in fed(program, given)]
        headers, protocols = self._cluster.headers(), ("v4.channel.k8s.io",)
        async with self._cluster.service.socket(
            self._exec, params=asked, headers=headers, protocols=protocols
        ) as ws:
            for start in range(0, len(given), 1 << 16):
                await ws.send_bytes(b"\0" + given[start : start + (1 << 16)])
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                if message.data[0] in _OUTPUTS:
                    printed.add(message.data[1:])
                elif message.data[0] == _END:
                    return _status(json.loads(message.data[1:])), None
        raise ToolLost("the pod ended before its command")

    async def remove(self) -> None:
        await self._cluster.delete(self._name)


def _status(end: dict[str, Any]) -> int:
    """Return the exit status that the last message of `exec` tells. Raises ToolLost for any other failure."""
    if end.get("status") == "Success":
        return 0
    causes = (end.get("details") or {}).get("causes") or ()
    code = next((one["message"] for one in causes if one.get("reason") == "ExitCode"), None)
    if code is None:
        raise ToolLost(f"the pod runs nothing: {end.get('message', '')[:300]}")
    return int(code)
