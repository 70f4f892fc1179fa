"""An engine on several hosts: the replica runs on the first host, and a follower (a Ray actor) on each other host.

Serve places the replica in the first bundle of a placement group, and the replica places a follower in each other
bundle. A follower runs the engine's ranks of its host in a separate process, and ends with its replica. If a
follower is lost, the replica's health check fails, and Serve restarts the complete group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import structlog
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentloop.errors import InvariantBroken, error_line
from agentloop_servers.cluster.host import prepare_engine_process
from agentloop_servers.cluster.nodes import node_address, prepare_engine_network
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.engines.vllm.config import HostShare
from agentloop_servers.engines.vllm.headless import command
from agentloop_servers.net.tcp import listening_socket
from agentloop_servers.processes.engine_parts import engine_actor_options, vllm_config
from agentloop_servers.processes.serve_process import begin_process

_ASK_INTERVAL_S = 1.0
_ANSWER_TIMEOUT_S = 5.0
_MAX_SILENT = 2  # status calls without a reply; a single late reply can be caused by a stall of this process

_log = structlog.stdlib.get_logger(__name__)


class Follower:
    """The actor that owns the process of one host's part of an engine."""

    _process: Process

    async def start(self, config: ServiceConfig, run_dir: Path, entry: EngineEntry, share: HostShare) -> None:
        """Start the process. Its output is in Ray's logs on this node."""
        config.keys.hide()
        begin_process(run_dir)
        if entry.on_gpu:
            prepare_engine_process(entry.num_threads)
        prepare_engine_network(config)
        engine = replace(vllm_config(config, entry), share=replace(share, address=node_address(config)))
        # The pipe on stdin closes when this process exits, which makes the guard in `headless.py` kill the group.
        self._process = await asyncio.create_subprocess_exec(*command(engine), stdin=PIPE, start_new_session=True)

    async def status(self) -> int | None:
        """Return the exit status of the process, and kill its workers if it has exited; None while it is
        running."""
        status = self._process.returncode
        if status is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return status


class EngineHosts:
    """The other hosts of a replica's engine. Runs in the replica's process, after Serve has placed it."""

    def __init__(self, config: ServiceConfig, run_dir: Path, entry: EngineEntry) -> None:
        self._config = config
        self._run_dir = run_dir
        self._entry = entry
        self._followers: list[Any] = []
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, on_lost: Callable[[str], None]) -> HostShare:
        """Start the followers, and return the share of this host; see `OtherHosts`."""
        group = ray.util.get_current_placement_group()
        if group is None:
            raise InvariantBroken("the replica of an engine on several hosts is not in a placement group")
        nodes = await asyncio.to_thread(_nodes_of, group)
        address = node_address(self._config)
        with listening_socket(address) as probe:  # closed before the engine listens there
            own = HostShare(self._entry.hosts, 0, address, address, probe.getsockname()[1])
        options = engine_actor_options(self._config, self._entry)
        for number in range(1, own.num_hosts):
            in_bundle = PlacementGroupSchedulingStrategy(group, number)
            follower = ray.remote(Follower).options(**options, scheduling_strategy=in_bundle).remote()
            self._followers.append(follower)
            watching = self._watch(follower, nodes[number], replace(own, number=number), on_lost)
            self._watches.append(asyncio.create_task(watching, name=f"follower-{number}"))
        return own

    async def close(self) -> None:
        """Kill the followers. Idempotent."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        followers, self._followers = self._followers, []
        for follower in followers:
            ray.kill(follower)

    async def _watch(self, follower: Any, node: str, share: HostShare, on_lost: Callable[[str], None]) -> None:
        try:
            await follower.start.remote(self._config, self._run_dir, self._entry, share)
            because = await _end_of(follower)
        except RayTaskError as error:
            because = error_line(error.cause)
        except Exception as error:  # Ray's exceptions have no common type
            because = error_line(error)
        lost = f"lost the part of engine {self._entry.name} on {node}: {because}"
        _log.error("engine_host_lost", because=lost)
        on_lost(lost)


async def _end_of(follower: Any) -> str:
    """Wait until a follower's process exits or the follower stops replying, and return the reason."""
    num_silent = 0
    while True:
        await asyncio.sleep(_ASK_INTERVAL_S)
        try:
            status = await asyncio.wait_for(follower.status.remote(), _ANSWER_TIMEOUT_S)
        except (TimeoutError, RayError) as error:
            num_silent += 1
            if num_silent == _MAX_SILENT:
                return f"no reply ({type(error).__name__})"
            continue
        num_silent = 0
        if status is not None:
            return f"its process exited with status {status}"


def _nodes_of(group: PlacementGroup) -> list[str]:
    """Return the addresses of a placement group's nodes, in the order of its bundles. Blocks."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    of_bundles = placement_group_table(group)["bundles_to_node_id"]
    return [addresses[of_bundles[number]] for number in sorted(of_bundles)]
