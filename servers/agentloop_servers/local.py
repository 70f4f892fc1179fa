"""A service on a local Ray of its own: started, ready, and gone again without a process left behind.

Every port is free or chosen by the system, so two such services run side by side. What Ray and the engines print
goes to files that the run directory links to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from agentloop.errors import ServiceUnavailable
from agentloop_servers.app import APP_NAME, application
from agentloop_servers.config import ServiceConfig
from agentloop_servers.http_guard import Keys

START_TIMEOUT_S = 600.0
RAY_LINK = "ray"  # within the run directory: the session whose logs hold what Ray and the engines printed


@asynccontextmanager
async def running_service(config: ServiceConfig, run_dir: Path) -> AsyncIterator[str]:
    """Start the service, yield its base URL once it is ready, stop everything on the way out.

    Raises ServiceUnavailable if it is not ready within START_TIMEOUT_S; the run directory says why.
    """
    Keys.from_environment(config.keys.user_key_env, config.keys.admin_key_env).check_bind(config.host)
    port = config.port or free_port(config.host)
    start_ray(run_dir)
    try:
        # In a thread, so that Ctrl-C ends the wait; the shutdown below then ends the thread's call too.
        starting = asyncio.create_task(asyncio.to_thread(_deploy, config, run_dir, port))
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.shield(starting)
        url = f"http://{config.host}:{port}"
        await _wait_until_ready(url)
        yield url
    except TimeoutError as error:
        raise ServiceUnavailable(f"not ready within {START_TIMEOUT_S:g} s: see {run_dir / RAY_LINK}") from error
    finally:
        await asyncio.shield(asyncio.to_thread(stop_ray))


def start_ray(run_dir: Path) -> None:
    """A new local Ray, quiet, whatever cluster the environment names."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    link = run_dir / RAY_LINK
    link.symlink_to(Path(context.address_info["session_dir"]) / "logs")


def stop_ray() -> None:
    """End the application gracefully, then Ray. Safe to call when neither runs."""
    if ray.is_initialized():
        try:
            serve.delete(APP_NAME)  # replicas close their engines; Serve itself ends with Ray
        finally:
            ray.shutdown()


def _deploy(config: ServiceConfig, run_dir: Path, port: int) -> None:
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=config.host, port=port),
        logging_config=quiet,
    )
    serve.run(application(config, run_dir.resolve()), name=APP_NAME, route_prefix="/", logging_config=quiet)


async def _wait_until_ready(url: str) -> None:
    """Poll the ingress until a replica takes traffic."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session, asyncio.timeout(60):
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # the proxy is not up yet; the deadline above ends the wait
            await asyncio.sleep(0.1)


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
