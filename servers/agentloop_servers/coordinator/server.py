"""The coordinator's HTTP port, with one route per call of its ports.

    ReplicaPort, FleetPort                by `Replicas`      (replicas.py)
    TrainerPort                           by `TrainerGroups` (agentloop/fleet/trainer_groups.py)
    WorkerPort, RolloutPort, LeasePort    by `Rollouts`      (rollouts.py): `take`, `finish`, `submit`, `lease`, ...
    MetricsPort                           by `MetricsBook`   (metrics.py)
    records, images, turn journals        by `TrajectoryStore` (agentloop/storage/trajectory_store.py)
    JobPort                               by `UpdateJobTable`  (update_jobs.py)
    endpoint processes                    by `EndpointPlaces`  (endpoint_places.py)
    the rest of FrontPort                 by `Coordinator`   (coordinator.py): `status`, `flight`, ...

A request body is the tuple of a call's arguments, a response body its result, both encoded by the codec. Callers
number their commands to the fleet; a command that arrives after a later one is refused.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from aiohttp import web

from agentloop.api.coordinator import (
    MAX_CALL_BYTES,
    FleetPort,
    FrontPort,
    LeasePort,
    MetricsPort,
    ReplicaPort,
    TrainerPort,
    WorkerPort,
)
from agentloop.values.codec import decode
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.private_http.fencing import CommandKind, FencingGuard
from agentloop_servers.private_http.server import PrivateServer, answer, body_of, token_of
from agentloop_servers.private_http.trust import Trust

SERVER_NAME = "coordinator"
_NONE = inspect.Parameter.empty
CALLS_END_S = 0.5  # calls that wait for work are always open, so a longer grace would only delay the end


@dataclass(frozen=True, slots=True)
class CallType:
    """The types of one call of a port."""

    name: str
    parameters: tuple[str, ...]
    arguments: Any  # the tuple type of the parameters
    answer: Any
    defaults: dict[str, Any]


def calls_of(port: type) -> dict[str, CallType]:
    """Return the calls of a port and its bases, by name."""
    found = {}
    for owner in reversed(port.__mro__):
        for name, method in vars(owner).items():
            if inspect.iscoroutinefunction(method):
                hints = get_type_hints(method)
                returned = hints.pop("return")
                signature = inspect.signature(method).parameters
                defaults = {each: signature[each].default for each in hints if signature[each].default is not _NONE}
                found[name] = CallType(
                    name,
                    tuple(hints),
                    tuple[tuple(hints.values())],  # type: ignore[misc]
                    returned,
                    defaults,
                )
    return found


COMMANDS = frozenset(calls_of(FleetPort) | calls_of(TrainerPort))
STAGES = frozenset({"update_weights", "push_adapter", "unload_adapter", *calls_of(TrainerPort)})


class CoordinatorServer(PrivateServer):
    def __init__(self, coordinator: Coordinator, trust: Trust, host: str = "127.0.0.1") -> None:
        self._fencing: defaultdict[int, FencingGuard] = defaultdict(FencingGuard)  # the caller's epoch -> its guard
        for_workers = calls_of(WorkerPort) | calls_of(LeasePort) | calls_of(MetricsPort)
        calls = calls_of(ReplicaPort) | for_workers | calls_of(FrontPort)
        routes = [
            web.post(f"/{name}", self._handler(call, coordinator.answering(name))) for name, call in calls.items()
        ]
        worker_paths = frozenset(f"/{name}" for name in for_workers)
        super().__init__(SERVER_NAME, routes, trust, host, MAX_CALL_BYTES, CALLS_END_S, worker_paths)
        coordinator.refused = self.gate.refused

    def _handler(
        self, call: CallType, method: Callable[..., Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            arguments = decode(await body_of(request), call.arguments)
            if call.name in COMMANDS:
                token = token_of(request)
                kind = CommandKind.STAGE if call.name in STAGES else CommandKind.FREEZE
                self._fencing[token.epoch].admit(kind, token)
            return answer(await method(*arguments))

        return handle
