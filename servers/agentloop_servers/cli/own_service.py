"""A run of `agentloop rollout` with a service that is started for it. Imports Ray."""

from __future__ import annotations

import asyncio
import os
import time

from rich.console import Console

from agentloop.client.client import RolloutClient
from agentloop.observability.logs import configure_logging
from agentloop_servers.cli.progress import open_progress
from agentloop_servers.cli.run import (
    Collect,
    RunOptions,
    RunResult,
    begin_run,
    check_can_end,
    collect,
    write_results,
)
from agentloop_servers.config.service import ServiceConfig, run_dir_in
from agentloop_servers.local import running_service


async def run_rollout(
    config: ServiceConfig, options: RunOptions, console: Console, collect_with: Collect | None = None
) -> RunResult:
    """Start a service, roll out, push in the middle, stop, and write the run directory.

    The service's own loops run the tasks, unless `collect_with` does.

    Raises InvalidRequest for tasks or a model that cannot be read, and for a limit under which the run could not
    end, before anything is started.
    """
    configure_logging(None)  # the run directory does not exist yet
    tasks = options.load_tasks()
    check_can_end(options, len(tasks) * options.num_samples, config.model_version)
    run_dir = run_dir_in(options.out)
    started_at = time.monotonic()

    def begin() -> None:
        begin_run(run_dir, console)
        say(f"starting {config.num_replicas} replica(s) of {config.model} …")

    def say(line: str) -> None:
        console.print(f"service  {line}", highlight=False, markup=False, soft_wrap=True)

    keys = (os.environ.get(config.keys.user_key_env), os.environ.get(config.keys.admin_key_env))
    # A free port, so that concurrent runs do not collide.
    private = config.model_copy(update={"port": 0, "run_dir": None, "tls": None, "public_url": None})
    async with running_service(private, run_dir, begin=begin, say=say) as url:
        console.print(f"service  ready after {time.monotonic() - started_at:.0f} s at {url}", highlight=False)
        async with RolloutClient(url, api_key=keys[0], admin_key=keys[1]) as client:
            await client.wait_until_ready()
            async with open_progress(console, client) as progress:
                collected = await (collect_with or collect)(client, tasks, options, progress)
    summary = await asyncio.to_thread(write_results, run_dir, collected)
    return RunResult(run_dir, summary, collected.push_error)
