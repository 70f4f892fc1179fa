"""The whole service in one process and without Ray: coordinator, simulated replicas, a worker and the HTTP edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentloop.clock import RealClock
from agentloop.parsers import get_parser
from agentloop.renderer import Renderer
from agentloop.store import TrajectoryStore
from agentloop.toolbox import Toolbox, load_tools
from agentloop.worker import Worker, WorkerConfig
from agentloop_servers.app import build_engine, initial_weights, mode_rules, model_facts, tool_names
from agentloop_servers.config import ServiceConfig
from agentloop_servers.coordinator import Coordinator
from agentloop_servers.coordinator_config import CoordinatorConfig
from agentloop_servers.dataplane import EngineClients
from agentloop_servers.http_guard import Keys
from agentloop_servers.ingress import create_app
from agentloop_servers.replica import Replica
from agentloop_tools import SHIPPED_TOOLS
from tests.support.front_door import serving

SIMULATED = Path(__file__).parents[2] / "servers" / "simulated.yaml"
SECRET = "in-process"


def simulated(**changed: object) -> ServiceConfig:
    """`servers/simulated.yaml` with some fields replaced; those of its engine as `engine={...}`."""
    document = ServiceConfig.load(SIMULATED).model_dump()
    engine = changed.pop("engine", {})
    return ServiceConfig.model_validate({**document, **changed, "engine": {**document["engine"], **engine}})


@asynccontextmanager
async def whole_service(config: ServiceConfig, run_dir: Path) -> AsyncIterator[str]:
    """Start the service; yields its base URL once a replica takes traffic."""
    async with AsyncExitStack() as closing:
        clients = EngineClients(SECRET)
        closing.push_async_callback(clients.close)
        coordinator = Coordinator(
            TrajectoryStore(run_dir / "trajectories.sqlite"),
            clients.connect,
            CoordinatorConfig(kv_policy=config.kv_policy, initial_weights=initial_weights(config)),
            RealClock(),
        )
        closing.push_async_callback(coordinator.close)
        await coordinator.start()
        for index in range(config.replicas):
            replica = Replica(f"replica-{index}", build_engine(config), coordinator, SECRET, config.host)
            closing.push_async_callback(replica.close)
            await replica.start()
        toolbox = Toolbox(load_tools(tool_names(config), SHIPPED_TOOLS))
        closing.push_async_callback(toolbox.close)
        facts = model_facts(config)
        worker = Worker(
            "worker",
            coordinator,
            clients.connect,
            Renderer.from_directory(config.model_path()),
            get_parser(config.workers.parser),
            toolbox,
            WorkerConfig(capacity=config.workers.capacity, kv_policy=config.kv_policy, poll_s=0.2),
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
        )
        running = asyncio.create_task(worker.run())
        closing.push_async_callback(asyncio.wait, [running])
        closing.callback(worker.close)
        app = create_app(
            coordinator,
            clients.connect,
            keys=Keys.of(),
            weight_roots=config.allowed_weight_roots(),
            tool_names=frozenset(tool_names(config)),
            rules=mode_rules(config),
        )
        url = await closing.enter_async_context(serving(app))
        async with asyncio.timeout(30):
            while len((await coordinator.status()).replicas) < config.replicas:
                await asyncio.sleep(0.01)
        yield url
