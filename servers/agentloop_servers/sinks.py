"""Receivers of ended trajectories and weight updates, which optional parts register: traces, for example."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ValidationError

from agentloop import parts
from agentloop.api.coordinator import UpdateReport
from agentloop.errors import InvalidRequest
from agentloop.types import Trajectory
from agentloop_servers.config.service import ServiceConfig

Ended = Trajectory | UpdateReport


class Sink(Protocol):
    """A registered receiver, made as `Sink(settings, run, model)`: with the names of the run and its model.

    `Settings` is the model of its section of the config.
    """

    Settings: ClassVar[type[BaseModel]]

    def give(self, ended: Ended) -> None:
        """Take a record or an update. Called in the event loop: it returns at once and raises nothing."""

    def close(self) -> None:
        """Send the queued records, within a few seconds. Called in a thread."""


def configured(config: ServiceConfig) -> list[tuple[Callable[..., Sink], BaseModel]]:
    """Return the sinks of a config with their settings.

    Raises InvalidRequest for a sink that is not installed, and for settings that it refuses.
    """
    found = [(parts.load(parts.SINKS, name, param=f"sinks.{name}"), given) for name, given in config.sinks.items()]
    try:
        sinks: list[tuple[Any, BaseModel]] = [(sink, sink.Settings.model_validate(given)) for sink, given in found]
    except ValidationError as error:
        raise InvalidRequest(f"settings of a sink: {error}", param="sinks") from error
    if config.tracing is not None:
        sinks.append((parts.load(parts.SINKS, "tracing", param="tracing"), config.tracing))
    return sinks


def begin_sinks(config: ServiceConfig, run_dir: Path, closing: AsyncExitStack) -> Callable[[Any], None]:
    """Start this process's sinks, until `closing`. Returns the function that passes ended records to them."""
    sinks = [sink(settings, run_dir.name, config.served_name) for sink, settings in configured(config)]
    for sink in sinks:
        closing.push_async_callback(asyncio.to_thread, sink.close)

    def give(ended: Ended) -> None:
        for sink in sinks:
            sink.give(ended)

    return give
