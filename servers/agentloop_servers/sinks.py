"""Sinks: receivers of finished trajectories and weight updates, registered by optional packages, such as
tracing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from agentloop import parts
from agentloop.api.coordinator import UpdateReport
from agentloop.types import Trajectory
from agentloop_servers.config.service import ServiceConfig

Ended = Trajectory | UpdateReport


class Sink(Protocol):
    """A registered sink, constructed with the keyword arguments `settings`, `run` and `model` (the last two are
    names)."""

    def give(self, ended: Ended) -> None:
        """Queue a record or an update. Called in the event loop: it must not block or raise."""

    def close(self) -> None:
        """Send the queued records within a few seconds. Called in a thread."""


def configured(config: ServiceConfig) -> list[tuple[Callable[..., Sink], dict[str, BaseModel]]]:
    """Return the sinks of a config with their validated settings.

    Raises InvalidRequest for a sink that is not installed, and for invalid settings.
    """
    sinks = [
        parts.configured(parts.SINKS, name, settings, param=f"sinks.{name}")
        for name, settings in config.sinks.items()
    ]
    if config.tracing is not None:
        sinks.append((parts.load(parts.SINKS, "tracing", param="tracing"), {"settings": config.tracing}))
    return sinks


def begin_sinks(config: ServiceConfig, run_dir: Path, closing: AsyncExitStack) -> Callable[[Any], None]:
    """Start this process's sinks, which `closing` closes. Return a function that passes finished records to
    them."""
    run, model = run_dir.name, config.served_name
    sinks = [sink(**settings, run=run, model=model) for sink, settings in configured(config)]
    for sink in sinks:
        closing.push_async_callback(asyncio.to_thread, sink.close)

    def give(ended: Ended) -> None:
        for sink in sinks:
            sink.give(ended)

    return give
