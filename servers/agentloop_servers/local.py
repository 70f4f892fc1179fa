"""A service on a local Ray of its own: started, ready, and gone again without a process left behind.

Every port is free or chosen by the system, so two such services run side by side. What Ray and the engines print
goes to files that the run directory links to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp
import ray
import structlog
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, LoggingConfig

from agentloop.errors import InvalidRequest, ServiceUnavailable, error_line
from agentloop_servers.app import APP_NAME, application
from agentloop_servers.cluster.host import NICENESS
from agentloop_servers.cluster.nodes import find_coordinator, for_nodes, node_labels, node_resources, run_trust
from agentloop_servers.cluster.ray_start import RayStart
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.net.tcp import listening_socket, url_of
from agentloop_servers.processes.checks import check_hosts, check_resources
from agentloop_servers.run.locks import pass_on_signal

T = TypeVar("T")
Say = Callable[[str], object]
"""Shows a line of progress to the one that waits for a start."""

_BESIDE_ENGINES_S = 120.0  # of a start, after the time that its engines may take: they say first why they did not
WEIGHTS_GRACE_S = 10.0  # for replicas to bring, or load, the weights of a run that goes on
AUTH_MODE = "RAY_AUTH_MODE"
_RAISED = re.compile(r"[\w.]*(Error|Exception|Request|Unreadable|Unavailable|Broken|Stable|Mismatch)\b.*: ")

_log = structlog.get_logger("local")

RAY_LINK = "ray"  # within the run directory: the session whose logs hold what Ray and the engines printed


def _say_nothing(line: str) -> None:
    """Show no progress."""


def _do_nothing() -> None:
    """Have nothing to begin."""


@asynccontextmanager
async def running_service(
    config: ServiceConfig,
    run_dir: Path,
    *,
    address: str | None = None,
    waits_for_weights: bool = False,
    begin: Callable[[], object] = _do_nothing,
    say: Say = _say_nothing,
) -> AsyncIterator[str]:
    """Start the service, yield its base URL once it is ready, stop everything on the way out.

    It runs on a Ray of its own, or on the cluster at `address`, which stays. With `waits_for_weights` it is ready
    also if no replica takes traffic before somebody pushes weights. `begin` is called once the config is known to
    be good and the run directory is made, before anything is started.

    Raises InvalidRequest for a config that cannot run, here or at all, and ServiceUnavailable if the port is taken
    or the service does not start; the run directory's link to Ray's logs leads to the reason.
    """
    config = config.model_copy(update={"port": free_port(config.host, config.port)})
    if address is not None:
        await _to_its_end(join_ray, address)
    hidden: dict[str, str] = {}
    is_deployed = False  # until then an application of this name is another service's, where Ray was there before
    url = url_of(config.host, config.port, config.scheme)
    try:
        model_sizes(config)  # refuses what the coordinator would refuse half a minute later
        app = application(config, run_dir)
        begin()
        hidden = config.hide_keys()  # before anything is started; the application has their digests
        if config.users is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, pass_on_signal, run_dir, signal.SIGHUP)
        if address is None:
            say("starting Ray")
            start = RayStart(say)
            starting = partial(start_ray, run_dir, start)
            await _to_its_end(starting, give_up=start.give_up)
        check_resources(config, ray.cluster_resources())
        check_hosts(config, node_resources(only_free=True), node_labels())
        say("starting the service's processes")
        is_deployed = True
        await _to_its_end(_deploy, app)
        within_s = max(entry.start_timeout_s for entry in config.entries) + _BESIDE_ENGINES_S
        await _wait_until_ready(url, run_dir, say, within_s, waits_for_weights=waits_for_weights)
        yield url
    finally:
        await _to_its_end(stop_ray, is_deployed)
        os.environ.update(hidden)


def start_ray(run_dir: Path, start: RayStart | None = None) -> None:
    """Start a new local Ray, quiet, whatever cluster the environment names. Its ports ask for Ray's token.

    Its actors have the priority of any other process: on a busy host they would start ten times as slowly.

    Raises InvalidRequest if the environment says that they shall not, and ServiceUnavailable if they do not.
    """
    if os.environ.get(AUTH_MODE, "token") != "token":
        raise InvalidRequest(f"{AUTH_MODE} is set to another mode than token: Ray's ports would be open")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(NICENESS, "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = (start or RayStart(_say_nothing)).run(
        include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
    )
    if os.environ.get(AUTH_MODE) != "token":  # which Ray has set, for all that it starts
        raise ServiceUnavailable("this Ray does not ask for its token: its ports are open")
    link = run_dir / RAY_LINK
    link.unlink(missing_ok=True)  # a run that goes on has one of its last start
    link.symlink_to(Path(context.address_info["session_dir"]) / "logs")


def join_ray(address: str) -> None:
    """Join a Ray cluster that runs; `auto` is this host's. Raises ServiceUnavailable if there is none."""
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError
        raise ServiceUnavailable(f"no Ray cluster at {address}: {error_line(error)}") from error


def stop_ray(is_deployed: bool = True) -> None:
    """End the application gracefully, if it is deployed, then Ray, if it is this process's own.

    Safe to call when neither runs.
    """
    if not ray.is_initialized():
        return
    try:
        if is_deployed:
            serve.delete(APP_NAME)  # replicas close their engines; Serve itself ends with Ray
    except Exception as error:  # RayServeException, RayError, or a plain one where Serve remembers an earlier Ray
        _log.debug("application_not_deleted", error=str(error))  # interrupted before there was one
    finally:
        ray.shutdown()


def _deploy(app: serve.Application) -> None:
    """Hand the application, which has a port of its own, to Serve, without waiting for its replicas."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    target = serve.RunTarget(app, name=APP_NAME, route_prefix=None, logging_config=quiet)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


async def drain(config: ServiceConfig, run_dir: Path, grace_s: float) -> int:
    """Have the service begin nothing more, and wait for what runs, at most `grace_s`.

    Returns the trajectories that are unfinished then: a resumed service goes on with them.
    """

    client = CoordinatorClient(partial(find_coordinator, APP_NAME), run_trust(for_nodes(config), run_dir))
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + grace_s
    try:
        while True:
            num_running, num_queued = await client.front.drain()
            if num_running == 0 or loop.time() >= deadline_at:
                return num_running + num_queued
            await asyncio.sleep(0.2)
    finally:
        await client.close()


async def _wait_until_ready(url: str, run_dir: Path, say: Say, within_s: float, *, waits_for_weights: bool) -> None:
    """Poll until all deployments run and a replica takes traffic, and show progress. Raises ServiceUnavailable."""
    up_at: float | None = None
    progress = _StartView(say)
    timeout = aiohttp.ClientTimeout(total=5)
    deadline_at = asyncio.get_running_loop().time() + within_s
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            state = (await _to_its_end(serve.status)).applications.get(APP_NAME)
            now = asyncio.get_running_loop().time()
            if state is not None:
                progress.show(state)
            if state is not None and state.status == "RUNNING":
                health = await _health(session, url)
                if health == 200:
                    return
                up_at = now if up_at is None and health == 503 else up_at
            if waits_for_weights and up_at is not None and now - up_at >= WEIGHTS_GRACE_S:
                return
            if state is not None and state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise ServiceUnavailable(f"the service did not start: {_reason(state)}. See {run_dir / RAY_LINK}")
            if now > deadline_at:
                raise ServiceUnavailable(f"not ready within {within_s:g} s. See {run_dir / RAY_LINK}")
            await asyncio.sleep(0.2)


class _StartView:
    """Lines of a start: one for each deployment whose processes have come a step further."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._shown: dict[str, str] = {}
        self._started_at = time.monotonic()

    def show(self, state: ApplicationStatusOverview) -> None:
        """Say what has changed since the last time."""
        for name, deployment in state.deployments.items():
            counts = {str(kind).lower(): count for kind, count in deployment.replica_states.items() if count > 0}
            line = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            if line and self._shown.get(name) != line:
                self._shown[name] = line
                self._say(f"{name}: {line} ({time.monotonic() - self._started_at:.0f} s)")


def _reason(state: ApplicationStatusOverview) -> str:
    """Return why a deployment failed: the last line of its traceback, or what Serve says of the application."""
    for name, deployment in state.deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines()]
        errors = [line for line in lines if _RAISED.match(line)]
        if errors:
            return f"{name}: {errors[-1]}"
    return state.message.strip() or "no reason given"


async def _health(session: aiohttp.ClientSession, url: str) -> int | None:
    try:
        async with session.get(f"{url}/health", ssl=False) as answer:
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return None  # the ingress is not up yet


async def _to_its_end(
    function: Callable[..., T], *arguments: object, give_up: Callable[[], object] = _do_nothing
) -> T:
    """A blocking call in a thread. A cancellation waits for its end, which `give_up` brings near: Ray must not be
    stopped under it."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait([call])
        call.exception()  # the cancellation says enough
        raise


def free_port(host: str, port: int = 0) -> int:
    """Return `port`, or for 0 one that nobody listens on now. Raises ServiceUnavailable if it is taken."""
    try:
        with listening_socket(host, port) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ServiceUnavailable(f"{url_of(host, port)} cannot be listened on: {error.strerror}") from error
