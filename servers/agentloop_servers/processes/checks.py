"""Checks of a config against the model and the cluster, before anything is started."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping

from agentloop.errors import InvalidRequest
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.processes.engine_parts import engine_bundle
from agentloop_servers.processes.placement import of_model
from agentloop_servers.processes.settings import weight_config


def check_model(config: ServiceConfig) -> None:
    """Raise InvalidRequest, or an error of `load_chat_format`, for a model that this config cannot serve."""
    weight_config(config)
    load_chat_format(config.model_path(), config.chat)
    for entry in config.entries:
        check_entry(config, entry)


def check_entry(config: ServiceConfig, entry: EngineEntry) -> None:
    """Raise InvalidRequest for a missing Python, or for expert options that the model or device cannot have."""
    python = None if entry.environment is None else entry.environment.py_executable
    if python is not None and shutil.which(shlex.split(python)[0]) is None:  # Ray would retry without end
        raise InvalidRequest(f"engine {entry.name}: there is no {python}", param="engines.environment")
    if entry.expert_parallel and not model_sizes(config).has_experts:
        raise InvalidRequest(
            f"engine {entry.name}: expert_parallel needs a mixture of experts, and {config.model} is dense",
            param="engine.expert_parallel",
        )
    if entry.quantization is not None and entry.device == "cpu" and model_sizes(config).has_experts:
        raise InvalidRequest(
            f"engine {entry.name}: quantised experts have no kernel on device cpu", param="engine.quantization"
        )


def check_resources(config: ServiceConfig, available: Mapping[str, float]) -> None:
    """Raise InvalidRequest if the replicas need more than the Ray cluster has; Ray itself would wait."""
    for name, option in (("GPU", "device"), ("CPU", "num_cpus")):
        asked = {
            of_model(entry.name, model): (entry.replicas * entry.hosts, engine_bundle(one, entry).get(name, 0.0))
            for model, one in config.of_models.items()
            for entry in one.entries
        }
        total, there = sum(count * each for count, each in asked.values()), available.get(name, 0.0)
        if total > there:
            parts = " + ".join(f"{name} {count} x {each:g}" for name, (count, each) in asked.items() if each)
            raise InvalidRequest(
                f"the replicas ask for {total:g} {name}s ({parts}), and this Ray has {there:g}: "
                f"take fewer replicas, or engines that need less ({option})",
                param="replicas",
            )


def check_hosts(
    config: ServiceConfig, free: Mapping[str, Mapping[str, float]], labels: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise InvalidRequest if no nodes fit the replicas with node labels or several hosts; Ray would wait.

    `free` are the resources and `labels` the labels of each node, by address; both are empty before Ray starts.
    """
    left = {address: dict(resources) for address, resources in free.items()}
    for entry in config.entries:
        bundle, wanted = engine_bundle(config, entry), entry.node_labels
        for _ in range(entry.replicas if entry.hosts > 1 or (wanted and free) else 0):
            fitting = [
                node
                for address, node in left.items()
                if wanted.items() <= labels[address].items()
                and all(node.get(name, 0) >= bundle[name] for name in bundle)
            ]
            if len(fitting) < entry.hosts:
                asked = " and ".join(_facts(wanted, bundle, wanted, bundle, "free "))
                there = ", ".join(
                    " ".join([address, *_facts(wanted, bundle, labels[address], node)])
                    for address, node in left.items()
                )
                raise InvalidRequest(
                    f"engine {entry.name}: no {'node' if entry.hosts == 1 else f'{entry.hosts} nodes'} with {asked}"
                    f" (nodes: {there or 'this host alone'})",
                    param="hosts",
                )
            for node in sorted(fitting, key=lambda node: [-node[name] for name in bundle])[: entry.hosts]:
                node.update({name: node[name] - amount for name, amount in bundle.items()})


def _facts(
    labels: Iterable[str],
    resources: Iterable[str],
    of_labels: Mapping[str, str],
    amounts: Mapping[str, float],
    kind: str = "",
) -> list[str]:
    """Return labels and resources as text, for an error message."""
    shown = [f"{name}={of_labels.get(name, '')}" for name in labels]
    return [*shown, *(f"{amounts.get(name, 0):g} {kind}{name}s" for name in resources)]
