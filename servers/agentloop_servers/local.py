"""Start and stop of a service on a local Ray instance, without leaving processes behind.

All ports are configured or chosen by the system, so several such services can run on one host. The output of Ray
and the engines is in files to which the run directory has a link.
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
from agentloop_servers.app import APP_NAME, application, model_dirs
from agentloop_servers.cluster.host import NICENESS
from agentloop_servers.cluster.nodes import find_coordinator, for_nodes, node_labels, node_resources, run_trust
from agentloop_servers.cluster.ray_start import RayStart
from agentloop_servers.config.models import Say
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.net.tcp import free_ports, listening_socket, url_of
from agentloop_servers.processes.checks import check_hosts, check_resources
from agentloop_servers.run.locks import pass_on_signal

T = TypeVar("T")

_BESIDE_ENGINES_S = 120.0  # added to the engines' start timeout, so that a failing engine reports its reason first
WEIGHTS_GRACE_S = 10.0  # time for replicas of a resumed run to report or load their weights
AUTH_MODE = "RAY_AUTH_MODE"
_RAISED = re.compile(r"[\w.]*(Error|Exception|Request|Unreadable|Unavailable|Broken|Stable|Mismatch)\b.*: ")

_log = structlog.get_logger("local")

RAY_LINK = "ray"  # link in the run directory to the logs of the Ray session, with the output of Ray and the engines


def _say_nothing(line: str) -> None:
    pass


def _do_nothing() -> None:
    pass


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
    """Start the service, yield its base URL when it is ready, and stop it at the end of the block.

    It runs on a new local Ray instance, or on the cluster at `address`, which is not stopped. With
    `waits_for_weights`, the service is ready even if no replica accepts traffic until weights are pushed. `begin`
    is called after the config was validated and the run directory was created, before any process is started.

    Raises InvalidRequest for a config that cannot run on this host, and ServiceUnavailable if the port is in use or
    the service does not start; the reason is in Ray's logs, to which the run directory has a link.
    """
    config = config.model_copy(update={"port": free_port(config.host, config.port)})
    if address is not None:
        await _to_its_end(join_ray, address)
    hidden: dict[str, str] = {}
    is_deployed = False
    url = url_of(config.host, config.port, config.scheme)
    try:
        model_sizes(config)  # fails early: the coordinator would raise the same error half a minute later
        app = application(config, run_dir)
        begin()
        hidden = config.hide_keys()  # before any process is started; the application has the keys' digests
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
    """Start a new local Ray instance without output, even if the environment names a cluster. Its ports require a
    token.

    Raises InvalidRequest if the environment disables the token, and ServiceUnavailable if Ray does not require it.
    """
    if os.environ.get(AUTH_MODE, "token") != "token":
        raise InvalidRequest(
            f"{AUTH_MODE} is {os.environ[AUTH_MODE]!r}, but must be 'token' or unset: without a token, anyone who"
            " can use Ray's ports can run code"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Normal priority: with Ray's default of nice 15, actors start ten times as slowly on a busy host.
    os.environ.setdefault(NICENESS, "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = (start or RayStart(_say_nothing)).run(
        include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
    )
    if os.environ.get(AUTH_MODE) != "token":  # Ray sets the variable for all processes that it starts
        raise ServiceUnavailable(
            f"Ray {ray.__version__} does not require a token, so anyone who reaches its ports could run code: "
            "install the locked version of Ray"
        )
    link = run_dir / RAY_LINK
    link.unlink(missing_ok=True)  # a resumed run has the link of its last start
    link.symlink_to(Path(context.address_info["session_dir"]) / "logs")


def join_ray(address: str) -> None:
    """Connect to a running Ray cluster; `auto` is the one on this host. Raises ServiceUnavailable if it fails."""
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError
        raise ServiceUnavailable(
            f"cannot connect to a Ray cluster at {address}: {error_line(error)}; start it with `ray start "
            "--head`, or unset RAY_ADDRESS"
        ) from error


def stop_ray(is_deployed: bool = True) -> None:
    """Delete the application gracefully if it is deployed, then stop Ray if this process started it.

    Safe to call if neither is running.
    """
    if not ray.is_initialized():
        return
    try:
        if is_deployed:
            serve.delete(APP_NAME)  # replicas close their engines; Serve itself stops with Ray
    except Exception as error:  # RayServeException, RayError, or a plain exception if Serve cached an earlier Ray
        _log.debug("application_not_deleted", error=str(error))  # the start was interrupted before the deployment
    finally:
        ray.shutdown()


def _deploy(app: serve.Application) -> None:
    """Deploy the application without waiting for its replicas, and without Serve's proxy: it has its own port."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    target = serve.RunTarget(app, name=APP_NAME, route_prefix=None, logging_config=quiet)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


async def drain(config: ServiceConfig, run_dir: Path, grace_s: float) -> int:
    """Make all models reject new work, and wait for running trajectories for at most `grace_s`.

    Returns the number of unfinished trajectories, with which a resumed service continues.
    """
    config, dirs = for_nodes(config), model_dirs(config, run_dir)
    clients = [
        CoordinatorClient(partial(find_coordinator, APP_NAME, name), run_trust(config.of_model(name), path))
        for name, path in dirs.items()
    ]
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + grace_s
    try:
        while True:
            counts = await asyncio.gather(*(client.front.drain() for client in clients))
            num_running, num_queued = map(sum, zip(*counts, strict=True))
            if num_running == 0 or loop.time() >= deadline_at:
                return num_running + num_queued
            await asyncio.sleep(0.2)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def _wait_until_ready(url: str, run_dir: Path, say: Say, within_s: float, *, waits_for_weights: bool) -> None:
    """Poll until all deployments are running and a replica accepts traffic; show progress. Raises
    ServiceUnavailable."""
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
                raise ServiceUnavailable(
                    f"the service was not ready within {within_s:g} s. See {run_dir / RAY_LINK}"
                )
            await asyncio.sleep(0.2)


class _StartView:
    """Shows the progress of a start: a line whenever the states of a deployment's processes change."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._shown: dict[str, str] = {}
        self._started_at = time.monotonic()

    def show(self, state: ApplicationStatusOverview) -> None:
        """Show the deployments that have changed since the last call."""
        for name, deployment in state.deployments.items():
            counts = {str(kind).lower(): count for kind, count in deployment.replica_states.items() if count > 0}
            line = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            if line and self._shown.get(name) != line:
                self._shown[name] = line
                self._say(f"{name}: {line} ({time.monotonic() - self._started_at:.0f} s)")


def _reason(state: ApplicationStatusOverview) -> str:
    """Return the reason of a failed deployment: the last error line of its traceback, or Serve's message."""
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
    """Run a blocking call in a thread. A cancellation calls `give_up` and waits for the call, because Ray must not
    be stopped while the call uses it."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait([call])
        call.exception()  # mark it as retrieved: only the cancellation is raised
        raise


def free_port(host: str, port: int = 0) -> int:
    """Return `port`, or for 0 a port that is currently free. Raises ServiceUnavailable if the port is in use."""
    try:
        if port == 0:
            return free_ports(1, host)[0]
        with listening_socket(host, port):
            return port
    except OSError as error:
        raise ServiceUnavailable(
            f"cannot listen on {url_of(host, port)}: {error.strerror}; stop the other process, or change the port"
        ) from error
