"""Sandboxes with Kubernetes' agent-sandbox: a claim allocates a pod from a warm pool, and commands run with `exec`.

A `SandboxClaim` (`extensions.agents.x-k8s.io/v1beta1`) names a pool of the namespace. It is deleted with its
sandbox, and after `max_life_s` at the latest, even if the worker was killed. The service account needs permission
to create, get and delete claims, and to `create` and `get` `pods/exec`.

Isolation: that of the pool's template, such as gVisor or Kata with a network policy. The template determines
memory, processes and disk; only the time and output limits are applied here. The pod's first container needs a
shell, tar and a writable `/task`.

Tested with our own server for this protocol; not tested in a cluster.
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
_ASK_S = 0.2  # interval of polls until a claim is ready
_EXEC = "v4.channel.k8s.io"
_OUTPUTS, _END = (1, 2), 3  # channels of the exec protocol


class Kubernetes(ServiceSandboxes):
    """Creates sandboxes in a cluster."""

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
        """The image of a source is the name of a warm pool; the default is `pool`.

        `account` is a folder with `token` and `ca.crt`, like in a pod. `ready_s` is the timeout for a claim.
        """
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
        """Return the headers with the account's token, read from its file because the cluster renews it."""
        return {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        return await super().ask(method, path, headers=self.headers(), **options)

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> KubernetesSandbox:
        if source.network is not None:
            raise InvalidRequest(
                f"network {source.network!r} cannot be selected: the template of the pool determines the network",
                param="network",
            )
        ends_at = datetime.now(UTC) + timedelta(seconds=self._max_life_s)
        lifecycle = {"shutdownTime": ends_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        claim = {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": {"generateName": "agentloop-"},
            "spec": {"warmPoolRef": {"name": source.image or self._pool}, "lifecycle": lifecycle},
        }
        created = await self.ask("POST", self._claims, json=claim)
        return KubernetesSandbox(self, source, limits, claim=f"{self._claims}/{created['metadata']['name']}")

    async def ready(self, claim: str) -> str:
        """Wait until a claim is ready, and return the path of its pod.

        Raises ToolLost with the claim's last state.
        """
        state = "no condition reported"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._ready_s):
                while True:
                    status: dict[str, Any] = (await self.ask("GET", claim)).get("status") or {}
                    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
                    ready: dict[str, Any] = conditions.get("Ready", {})
                    if ready.get("status") == "True":
                        return f"{self._pods}/{status['sandbox']['name']}"
                    state = f"{ready.get('reason', 'no condition reported')} {ready.get('message', '')}".strip()
                    await asyncio.sleep(_ASK_S)
        name = claim.rpartition("/")[2]
        raise ToolLost(f"claim {name} was not ready within {self._ready_s:g} s: {state[:300]}")


class KubernetesSandbox(CommandSandbox):
    """A claimed pod."""

    def __init__(self, maker: Kubernetes, source: SandboxSource, limits: SandboxLimits, *, claim: str) -> None:
        super().__init__(maker, source, limits)
        self._cluster = maker
        self._claim = claim
        self._pod = ""  # the path of the pod, once the claim is ready

    async def begin(self) -> None:
        self._pod = await self._cluster.ready(self._claim)
        answer(await self.run(["mkdir", "-p", FOLDER], self._limits))

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        parameters = [("stdin", str(bool(given)).lower()), ("stdout", "true"), ("stderr", "true")]
        parameters += [("command", word) for word in fed(program, given)]
        path, headers = f"{self._pod}/exec", self._cluster.headers()
        async with (
            self._cluster.http() as http,
            http.ws_connect(path, params=parameters, headers=headers, protocols=[_EXEC], max_msg_size=0) as ws,
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
        raise ToolLost(
            "the connection to the pod ended before the exit status of the command arrived: the pod may be deleted"
        )

    async def remove(self) -> None:
        await self._cluster.delete(self._claim)


def _status(end: dict[str, Any]) -> int:
    """Return the exit status in the last message of `exec`. Raises ToolLost for any other failure."""
    if end.get("status") == "Success":
        return 0
    causes = (end.get("details") or {}).get("causes") or ()
    code = next((cause["message"] for cause in causes if cause.get("reason") == "ExitCode"), None)
    if code is None:
        raise ToolLost(f"the pod did not run the command: {end.get('message', '')[:300]}")
    return int(code)
