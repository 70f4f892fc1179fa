"""Published clients on one service with two real engines, each in its environment: `make test-contracts`.

The results of each client form a row of the table in `docs/guides/contracts.md`, which a complete run writes. The
last tests kill a replica once for all clients, while each client has calls on it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from agentloop.client.client import RolloutClient
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.net.tcp import listening_socket
from agentloop_servers.processes.engine_parts import build_engine
from tests.parts.trainers.contract_clients import CLIENTS, ROOT, VERBS, write
from tests.servers.recompute import POLICY
from tests.support.engine.recording import RecordingEngine
from tests.support.service.trainer_programs import PROGRAMS
from tests.support.service.whole_service import whole_site

pytestmark = [pytest.mark.trainers, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

VERB_TIMEOUT_S = 240
NUM_PROMPTS = 4
S3 = ROOT / ".venv" / "clients" / "s3"
RUN, REGION = "run-1", "us-east-1"
GREEDY = "What is 17 times 23?"


def having(verb: str) -> list[str]:
    """Return the names of the clients that have a verb."""
    return [name for name, client in CLIENTS.items() if verb not in client.lacks]


class ContractSite:
    """The service, its engines, the clients' processes, and their results."""

    def __init__(
        self,
        client: RolloutClient,
        url: str,
        engines: list[RecordingEngine],
        run_dir: Path,
        bucket: dict[str, str],
    ) -> None:
        """`bucket` is the environment of a client that uploads weights."""
        self.client, self.url, self.engines, self.run_dir, self.bucket = client, url, engines, run_dir, bucket
        self.tokenizer = tokenizers.Tokenizer.from_file(str(POLICY / "v1" / "tokenizer.json"))
        self.processes: dict[str, Process] = {}
        self.proved: defaultdict[str, set[str]] = defaultdict(set)
        self.killed: dict[str, Any] = {}

    async def tell(self, name: str, verb: str, *arguments: object) -> dict[str, Any]:
        """Send a verb to a client. Returns its answer; an error of the client fails the test."""
        if name not in self.processes:
            self.processes[name] = await self._start(name)
        stdin, stdout = self.processes[name].stdin, self.processes[name].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(" ".join(map(str, (verb, *arguments))).encode() + b"\n")
        async with asyncio.timeout(VERB_TIMEOUT_S):
            line = await stdout.readline()
        log = (self.run_dir / f"{name}.log").read_text()
        assert line, log[-6000:]
        said: dict[str, Any] = json.loads(line)
        assert "error" not in said, f"{said['error']}\n{log[-3000:]}"
        return said

    async def _start(self, name: str) -> Process:
        client = CLIENTS[name]
        python = client.python if client.lock.startswith(("trainers", "clients")) else Path(sys.executable)
        if client.needs and not python.exists():
            pytest.skip(client.needs)
        assert python.exists(), f"no environment for {name}: run `make test-contracts`"
        prompts = [self.tokenizer.encode(f"{name}: call {number} of all") for number in range(NUM_PROMPTS)]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "servers", ROOT / "tools"))),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "COREWEAVE_API_URL": self.url,
            "COREWEAVE_API_TOKEN": "none",
            "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": RUN,
            **self.bucket,
        }
        with (self.run_dir / f"{name}.log").open("w") as log:
            return await asyncio.create_subprocess_exec(
                python,
                PROGRAMS / client.program,
                self.url,
                json.dumps([one.ids for one in prompts]),
                name,
                env=environment,
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=1 << 24,
            )

    def assert_served(self, said: dict[str, Any]) -> None:
        """Check that engines sampled the tokens that the client received, in however many parts."""
        sampled = {(*prompt, *ids) for engine in self.engines for prompt, ids in engine.served}
        assert said["served"]
        for prompt, ids in said["served"]:
            assert ids
            assert (*prompt, *ids) in sampled

    def running(self, engine: RecordingEngine) -> set[str]:
        """Return the names of the clients that have a call on an engine."""
        prompts = Counter(request.token_ids for request in engine.requests)
        open_calls = prompts - Counter(prompt for prompt, _ in engine.served)
        texts = [self.tokenizer.decode(list(prompt)) for prompt in open_calls]
        return {name for name in CLIENTS if any(f"{name}:" in text for text in texts)}

    def pid_of(self, engine: RecordingEngine) -> int:
        """Return the process of an engine. Engines are started one after the other."""
        found = [
            one for one in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(one.cmdline())
        ]
        return sorted(found, key=psutil.Process.create_time)[self.engines.index(engine)].pid

    async def greedy(self) -> tuple[int, ...]:
        prompt = self.tokenizer.encode(GREEDY).ids
        return (await self.client.generate(prompt, max_tokens=24, temperature=0.0)).token_ids

    async def close(self) -> None:
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:  # a broken group blocks its process
                process.kill()
                await process.wait()


@asynccontextmanager
async def bucket() -> AsyncIterator[dict[str, str]]:
    """Serve S3 on this machine with moto, and let this process read it with s3fs. Yields a client's environment;
    empty without them."""
    if not (S3 / "bin").exists() or not CLIENTS["cwtrain"].python.exists():
        yield {}
        return
    with listening_socket("127.0.0.1") as free:
        port = str(free.getsockname()[1])
    server = await asyncio.create_subprocess_exec(S3 / "bin" / "moto_server", "-H", "127.0.0.1", "-p", port)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_EC2_METADATA_DISABLED": "true"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(next((S3 / "lib").glob("python*/site-packages")))])
        for name, value in (
            {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": REGION} | keys
        ).items():
            patch.setenv(name, value)
        try:
            yield {"CW_S3_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_REGION": REGION, **keys}
        finally:
            server.terminate()
            await server.wait()


@pytest.fixture(scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[ContractSite]:
    document = ServiceConfig.load(ROOT / "servers" / "cpu_push.yaml").model_dump()
    engines: list[RecordingEngine] = []

    def build(of: ServiceConfig) -> RecordingEngine:
        engines.append(RecordingEngine(build_engine(of)))
        return engines[-1]

    run_dir = tmp_path_factory.mktemp("run")
    async with bucket() as environment:
        store = {"store": "s3://weights/policies", "run": RUN, "follows": False} if environment else None
        config = ServiceConfig.model_validate({**document, "weights": store})
        async with whole_site(config, run_dir, build) as service, RolloutClient(service.urls[0]) as client:
            await client.wait_until_ready()
            found = ContractSite(client, service.urls[0], engines, run_dir, environment)
            try:
                yield found
            finally:
                await found.close()
    asked = {item.name for item in request.session.items if item.path == Path(__file__)}
    is_complete = len(asked) == sum(len(having(verb)) for verb in VERBS)
    if is_complete and all(client.python.exists() for client in CLIENTS.values() if client.needs):
        write(found.proved)


@pytest.mark.parametrize("name", having("rollouts"))
async def test_rollouts(name: str, site: ContractSite) -> None:
    said = await site.tell(name, "rollouts")
    site.assert_served(said)
    site.proved[name].add("rollouts")


@pytest.mark.parametrize("name", having("update"))
async def test_an_update(name: str, site: ContractSite) -> None:
    """The service loads v0 from a directory, and then v1 by the client's own method."""
    version = ((await site.client.status()).weight_version or 0) + 1
    await site.client.update_weights(POLICY / "v1", version=version)
    expected = await site.greedy()
    await site.client.update_weights(POLICY / "v0", version=version + 1)
    assert await site.greedy() != expected
    await site.tell(name, "update", version + 2)
    assert (await site.client.status()).weight_version == version + 2
    assert await site.greedy() == expected
    site.proved[name].add("update")


@pytest.mark.parametrize("name", having("pause"))
async def test_a_pause(name: str, site: ContractSite) -> None:
    """The client's pause delays its calls, and they complete after it."""
    site.assert_served(await site.tell(name, "pause"))
    assert not (await site.client.status()).is_paused
    site.proved[name].add("pause")


@pytest.mark.parametrize("name", having("refused"))
async def test_a_refused_version(name: str, site: ContractSite) -> None:
    assert "409" in (await site.tell(name, "refused"))["refused"]
    site.proved[name].add("refused")


async def lose_a_replica(site: ContractSite) -> None:
    """Kill an engine once each client that samples has calls on it; until then, each client samples again."""
    callers = set(having("killed")) & set(having("rollouts"))
    for engine in site.engines:
        engine.requests.clear()
        engine.served.clear()
    is_killed = asyncio.Event()

    async def calling(name: str) -> dict[str, Any]:
        while True:
            said = await site.tell(name, "killed")
            if is_killed.is_set():
                return said

    calls = [asyncio.create_task(calling(name)) for name in callers]
    async with asyncio.timeout(VERB_TIMEOUT_S):
        while (victim := next((one for one in site.engines if callers <= site.running(one)), None)) is None:
            await asyncio.sleep(0.02)
            for call in calls:
                assert not call.done(), call.exception()
    os.kill(site.pid_of(victim), signal.SIGKILL)
    is_killed.set()
    site.killed = dict(zip(callers, await asyncio.gather(*calls, return_exceptions=True), strict=True))


@pytest.mark.parametrize("name", having("killed"))
async def test_a_killed_replica(name: str, site: ContractSite) -> None:
    if not site.killed:
        await lose_a_replica(site)
    if name not in having("rollouts"):
        version = (await site.client.status()).weight_version or 0
        await site.tell(name, "killed")
        assert (await site.client.status()).weight_version == version + 1
    else:
        said = site.killed[name]
        assert not isinstance(said, BaseException), said
        site.assert_served(said)
    site.proved[name].add("killed")
