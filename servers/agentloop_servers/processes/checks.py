"""Checks of a config against the model and the cluster before any process is started."""

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
    """Raise InvalidRequest, or an error of `load_chat_format`, if the service cannot serve the model of its
    config."""
    weight_config(config)
    load_chat_format(config.model_path(), config.chat)
    for entry in config.entries:
        check_entry(config, entry)


def check_entry(config: ServiceConfig, entry: EngineEntry) -> None:
    """Raise InvalidRequest for a missing `environment.py_executable`, or for options that the model does not allow.

    These are `expert_parallel` and `routed_experts` for a dense model, and `quantization` for a mixture of experts
    on CPU.
    """
    python = None if entry.environment is None else entry.environment.py_executable
    if python is not None and shutil.which(shlex.split(python)[0]) is None:  # Ray would retry endlessly
        raise InvalidRequest(
            f"engine {entry.name}: the command {python} of environment.py_executable does not exist",
            param="engines.environment",
        )
    for key in ("expert_parallel", "routed_experts"):
        is_on = getattr(entry, key) and entry.kind != "simulated"  # a simulated engine has no model
        if is_on and not model_sizes(config).has_experts:
            raise InvalidRequest(
                f"engine {entry.name}: {key} requires a mixture of experts, but {config.model} is dense",
                param=f"engine.{key}",
            )
    if entry.quantization is not None and entry.device == "cpu" and model_sizes(config).has_experts:
        raise InvalidRequest(
            f"engine {entry.name}: quantized experts have no kernel on device cpu: remove quantization",
            param="engine.quantization",
        )


def check_resources(config: ServiceConfig, available: Mapping[str, float]) -> None:
    """Raise InvalidRequest if the replicas need more resources than the Ray cluster has. Ray would wait forever."""
    for name, option in (("GPU", "device"), ("CPU", "num_cpus")):
        demands = {
            of_model(entry.name, name_of_model): (
                entry.replicas * entry.hosts,
                engine_bundle(model, entry).get(name, 0.0),
            )
            for name_of_model, model in config.of_models.items()
            for entry in model.entries
        }
        total, num_available = sum(count * each for count, each in demands.values()), available.get(name, 0.0)
        if total > num_available:
            parts = " + ".join(f"{name} {count} x {each:g}" for name, (count, each) in demands.items() if each)
            raise InvalidRequest(
                f"the replicas require {total:g} {name}s ({parts}), but the Ray cluster has {num_available:g}: "
                f"configure fewer replicas, or engines that need less ({option})",
                param="replicas",
            )


def check_hosts(
    config: ServiceConfig, free: Mapping[str, Mapping[str, float]], labels: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise InvalidRequest if the nodes cannot run the replicas with node labels or several hosts. Ray would wait
    forever.

    `free` are the free resources and `labels` the labels of each node, by address; both are empty before Ray
    starts.
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
                required = " and ".join(_facts(wanted, bundle, wanted, bundle, "free "))
                nodes = ", ".join(
                    " ".join([address, *_facts(wanted, bundle, labels[address], node)])
                    for address, node in left.items()
                )
                raise InvalidRequest(
                    f"engine {entry.name}: no {'node' if entry.hosts == 1 else f'{entry.hosts} nodes'} with"
                    f" {required} (nodes: {nodes or 'this host alone'})",
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
    """Format labels and resources for an error message."""
    shown = [f"{name}={of_labels.get(name, '')}" for name in labels]
    return [*shown, *(f"{amounts.get(name, 0):g} {kind}{name}s" for name in resources)]
