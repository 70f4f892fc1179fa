"""`agentloop rollout --agent`: the part of a run in which a user's own agent does the work.

The agent runs in this process (or in processes of this one), over sessions of the service that `rollout_run.py`
starts; run directory, weight push, summary and export are the same as for the service's own loops.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from agentloop.agents import AgentLimits, AgentProgram, AgentRecord, run_agents
from agentloop.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.types import RolloutTask
from agentloop_servers.cli.progress import ProgressView, Tally
from agentloop_servers.cli.run import Collected, MidRunPush, RunOptions
from agentloop_servers.config import ServiceConfig

MAX_ERRORS_SHOWN = 5  # the log has them all


def load_program(agent: str | None, command: str | None, config: ServiceConfig) -> AgentProgram | None:
    """The agent that the command line names, if it names one. Raises InvalidRequest.

    A module is found as by `python -m`: the working directory counts. A command does not see the service's keys.
    """
    if agent is not None and command is not None:
        raise InvalidRequest("either an agent or an agent command, not both", param="agent")
    if agent is not None:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return AgentProgram.load(agent)
    if command is not None:
        keys = frozenset({config.keys.user_key_env, config.keys.admin_key_env})
        return AgentProgram.command(command, withheld=keys)
    return None


@dataclass(frozen=True, slots=True)
class AgentCollect:
    """A `Collect` that runs the agent once for each sample."""

    program: AgentProgram
    concurrency: int

    async def __call__(
        self, client: RolloutClient, tasks: list[RolloutTask], options: RunOptions, progress: ProgressView
    ) -> Collected:
        """Raises InvalidRequest for a staleness limit, which sessions do not have, and for an unknown reward."""
        if options.limit is not None:
            raise InvalidRequest("a staleness limit is for the service's own loops", param="max_staleness")
        started_at = time.monotonic()
        tally = Tally(len(tasks) * options.num_samples, started_at)
        progress.show(tally)
        view = _View(tally, progress)
        async with MidRunPush(client, options.push, tally.num_trajectories, progress) as pushing:

            def on_record(record: AgentRecord) -> None:
                view.add(record)
                pushing.look(tally.num_finished)

            await run_agents(
                client,
                self.program,
                tasks,
                num_samples=options.num_samples,
                limits=AgentLimits(concurrency=self.concurrency),
                on_record=on_record,
            )
            wall_s = time.monotonic() - started_at
        return pushing.collected(tally, wall_s)


@dataclass(slots=True)
class _View:
    tally: Tally
    progress: ProgressView
    num_shown: int = 0

    def add(self, record: AgentRecord) -> None:
        """Count it, and say what went wrong the first few times."""
        if record.trajectory is not None:
            self.tally.add(record.trajectory)
        else:
            self.tally.add_lost()
        self.progress.show(self.tally)
        trouble = record.error or (f"reward: {record.reward_error}" if record.reward_error else None)
        if trouble is not None and self.num_shown < MAX_ERRORS_SHOWN:
            self.num_shown += 1
            self.progress.say(f"agent    {record.task_id}: {trouble}")
