"""The numbers that a config leaves open: how many processes of each kind, and what they take at once.

A service without GPUs has one of each. With GPUs the numbers follow from the engines and from the CPUs of the host
that the service is deployed from. The number of ingress processes is kept with the run, whose sessions they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentloop_servers.config import ServiceConfig, saved_config
from agentloop_servers.engine_config import EngineConfig
from agentloop_servers.host import usable_cpus

_CPUS_OF_AN_ENGINE = 2  # its process and its front end, which step and answer all the time
_CPUS_OF_OTHERS = 2  # the coordinator, and Ray
_CPUS_OF_EACH = 3  # CPUs for one process of each kind, and a little for users' tools
_MOST_OF_AN_ENGINE = 4
_MAX_PROCESSES = 16  # of a kind

Engine = TypeVar("Engine", bound=EngineConfig)


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """The processes of a service that its host has CPUs for."""

    num_ingress: int
    num_workers: int


def processes_for(num_engines: int, num_cpus: int) -> ProcessCounts:
    """Return how many ingress and worker processes go with so many engines on GPUs.

    An engine of a 4B model ends about 65 turns of 256 tokens a second, which takes an eighth of a core of workers
    or of ingress processes, and half a core of these where all are streamed. But turns that began together end
    together: of 500 at 2 ms each, the last waits a second for the one process that has them all, and its place in
    the engine stands idle. So an engine has four processes of each kind, as far as engines leave CPUs for them.
    """
    spare = num_cpus - _CPUS_OF_AN_ENGINE * num_engines - _CPUS_OF_OTHERS
    num_each = max(1, min(spare // _CPUS_OF_EACH, _MOST_OF_AN_ENGINE * num_engines, _MAX_PROCESSES))
    return ProcessCounts(num_each, num_each)


def sized(config: ServiceConfig, run_dir: Path, num_cpus: int | None = None) -> ServiceConfig:
    """Return the config with every number in it. `num_cpus`: of the host; None: this one's.

    Workers take twice as many trajectories as engines have seats: the others wait for tools. Raises InvalidRequest
    if the run's own config cannot be read.
    """
    counts, workers = ProcessCounts(1, 1), config.workers
    if config.num_gpu_engines:
        counts = processes_for(config.num_gpu_engines, usable_cpus() if num_cpus is None else num_cpus)
    first = saved_config(run_dir)
    num_ingress = config.ingress_replicas or (first.ingress_replicas if first is not None else counts.num_ingress)
    num_workers = workers.replicas or counts.num_workers
    capacity = workers.capacity
    if capacity is None and config.num_gpu_engines:
        on_gpu = [entry for entry in config.entries if entry.on_gpu]
        num_seats = sum(entry.num_seats * entry.replicas * entry.data_parallel_size for entry in on_gpu)
        capacity = max(256, 2 * num_seats // num_workers)
    sized_engines = None if config.engines is None else [_seated(entry) for entry in config.engines]
    return config.model_copy(
        update={
            "ingress_replicas": num_ingress or 1,
            "engine": _seated(config.engine) if sized_engines is None else config.engine,
            "engines": sized_engines,
            "workers": workers.model_copy(update={"replicas": num_workers, "capacity": capacity or 256}),
        }
    )


def _seated(engine: Engine) -> Engine:
    return engine.model_copy(update={"max_running": engine.num_seats})
