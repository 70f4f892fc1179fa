"""A worker's way to an engine over connections that are cut at every stage of a call."""

from __future__ import annotations

import asyncio

from agentloop.clock import RealClock
from agentloop.generation.leased_engine import LeasedEngine
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import GenerateRequest, Lease, SamplingParams
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import DataPlaneServer
from tests.support.endpoint.cutting_proxy import CuttingProxy

NUM_CALLS = 60
MAX_ATTEMPTS = 12
SECRET = "secret"


class OneLease:
    """The lease of a fleet of one replica, behind the proxy."""

    def __init__(self, url: str) -> None:
        self.num_moves = 0
        self._lease = Lease("l", "r", url)

    async def lease(self, request: GenerateRequest) -> Lease:
        return self._lease

    async def move(self, failed: Lease) -> None:
        self.num_moves += 1


async def test_18_connections_that_are_cut_cost_retries_within_their_bound() -> None:
    spec = SimulatedSpec(vocab_size=1000)
    engine = SimulatedEngine(spec, clock=RealClock())
    await engine.start()
    server = DataPlaneServer(engine, "r", SECRET)
    await server.start()
    proxy = CuttingProxy(int(server.url.rpartition(":")[2]), rate=0.3, seed=1)
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    clients = EngineClients(SECRET)
    try:
        leases = OneLease(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        for number in range(NUM_CALLS):
            leased = LeasedEngine(clients.connect, leases, vocab_size=1000, max_attempts=MAX_ATTEMPTS)
            sampling = SamplingParams(20, temperature=0.0, min_tokens=20)
            request = GenerateRequest(f"call-{number}", (1, 2, number), sampling, 20.0)
            async with asyncio.timeout(20.0):
                cut = await leased.generate(request)
            assert cut.token_ids == (await engine.generate(request)).token_ids
        assert len(proxy.cuts) == 5, proxy.cuts
        assert leases.num_moves <= proxy.cuts.total()
        assert engine.load().num_running == 0
    finally:
        listening.close()
        await clients.close()
        await server.close()
        await engine.close()
