"""The Ray Serve application: the coordinator and the engines of each model, the workers, the ingress processes.

`processes/` has a module for each kind of process. Requests with tokens use the replicas' own ports, never Serve. A
Serve config imports `build`; `local.py` starts the same application on a local Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import structlog
from pydantic import SecretStr
from ray import serve

from agentloop import parts
from agentloop.errors import InvalidRequest
from agentloop_servers.cluster.nodes import (
    check_certificates,
    check_trust,
    coordinator_place,
    for_nodes,
    node_address,
    node_labels,
    node_resources,
    num_nodes,
    run_trust,
    where_the_run_is,
)
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import (
    ServiceConfig,
    keep_config,
    keep_tokenizer,
    located,
    run_dir_in,
    weight_bytes,
)
from agentloop_servers.coordinator.model_turns import check_turns
from agentloop_servers.ingress.routes import registered_routes
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.checks import check_hosts, check_model
from agentloop_servers.processes.coordinator import CoordinatorDeployment
from agentloop_servers.processes.engine_parts import engine_actor_options, engine_placement
from agentloop_servers.processes.engine_replica import EngineReplicaDeployment
from agentloop_servers.processes.ingress import IngressDeployment
from agentloop_servers.processes.placement import engine_deployment, of_model, on_each_node, processes
from agentloop_servers.processes.settings import sized
from agentloop_servers.processes.shared import ModelRun, followed_store
from agentloop_servers.processes.worker import AgentLoopWorkerDeployment
from agentloop_servers.run.store import check_store, keep_run, restore_run, url_elsewhere
from agentloop_servers.sinks import configured
from agentloop_servers.users import keys_of

APP_NAME = "agentloop"
COORDINATOR_NAME = "Coordinator"
ENDS_TURNS_WITHIN_S = 70.0  # shutdown time of a replica that autoscaling removes: it waits a minute for its turns
COORDINATOR_STAYS_S = 1.0  # all processes shut down at once, and the others deregister at the coordinator

_log = structlog.get_logger("app")


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for a Serve config's `args`, the fields of `ServiceConfig`. Raises InvalidRequest."""
    config = ServiceConfig.model_validate(args)
    if config.port == 0:
        raise InvalidRequest(
            "port 0 is not supported in a deployed service, because its processes share a port: a deployed service"
            " needs a port number",
            param="port",
        )
    config = with_model_folders(config, lambda line: _log.info("model", progress=line))
    run_dir = Path(config.run_dir) if config.run_dir else run_dir_in(Path("runs"))
    return application(config, run_dir)


def application(config: ServiceConfig, run_dir: Path) -> serve.Application:
    """Return the bound deployments: coordinator and engines of each model, the workers, the ingress.

    Checks the config, the model and the cluster before any process is started or file written. Raises
    InvalidRequest, and the errors of `load_chat_format`.
    """
    config, run_dir = for_nodes(config), run_dir.resolve()  # Ray changes a replica's working directory
    where_the_run_is(config, restore_run, config, run_dir)
    config = where_the_run_is(config, sized, config, run_dir, num_nodes=num_nodes())
    if config.users is not None:  # an absolute path, for the same reason
        config = config.model_copy(update={"users": str(located(config.users))})
    keys = keys_of(config)  # digests, for the ingress processes only
    if keys.notice is not None:
        _log.warning("open_admin_routes", because=keys.notice)
    check_trust(config, keys)
    if config.tls is not None:
        config.tls.check()
    check_certificates(config)
    configs = config.of_models
    for each in configs.values():
        check_model(each)
    if config.served_name in configs:
        raise InvalidRequest(
            f"two models are called {config.served_name!r}: change endpoint.model_name or the name in `models`",
            param="models",
        )
    if config.turns is not None:
        sizes = {each.served_name: each.num_gpu_engines * weight_bytes(each) for each in configs.values()}
        check_turns(sizes, psutil.virtual_memory().available)
    check_hosts(config, node_resources(), node_labels())
    trust = where_the_run_is(config, begun_run, config, run_dir)
    dirs = model_dirs(config, run_dir)
    others = [ModelRun(name, path, begun_run(configs[name], path)) for name, path in dirs.items() if name]
    stored, head = store_elsewhere(config, run_dir), where_the_run_is(config, node_address, config)
    deployed = [
        deployment
        for model in (ModelRun("", run_dir, trust), *others)
        for deployment in model_processes(stored, configs[model.name], model, head, () if model.name else others)
    ]
    # Remove the database's password, because workers run user code.
    where = (config.model_copy(update={"store": None}), run_dir)
    workers = processes(
        AgentLoopWorkerDeployment,
        "AgentLoopWorker",
        health_check_timeout_s=config.workers.silent_after_s / 2,  # a worker is lost after two failed checks
        placement=on_each_node(config, config.workers.replicas or 1),
    )
    ingress = processes(
        IngressDeployment,
        "Ingress",
        placement=on_each_node(config, config.num_ingress),
        max_ongoing_requests=10_000,
    )
    of_workers = [replace(other, trust=other.trust.of_workers) for other in others]
    own_keys = {named.name: keys_of(configs[named.name]) for named in config.models if named.keys is not None}
    # Serve deploys the ingress and its arguments, so the ingress takes the other deployments as arguments.
    deployed.append(workers.bind(*where, trust.of_workers, config.store is not None, of_workers))
    return ingress.bind(stored, run_dir, trust, {"": keys, **own_keys}, others, *deployed)


def model_dirs(config: ServiceConfig, run_dir: Path) -> dict[str, Path]:
    """Return the run directories of all models by name; "" is the policy."""
    return {
        name: run_dir / "models" / f"{run_dir.name}.{name}" if name else run_dir
        for name in ("", *(model.name for model in config.models))
    }


def model_processes(
    service: ServiceConfig, config: ServiceConfig, model: ModelRun, head: str, others: Sequence[ModelRun]
) -> list[serve.Application]:
    """Return the deployments of a model's coordinator and engine replicas.

    `service` is the service's config with its store. `others` are the models that share the accelerators with
    `turns`.
    """
    stateless = service.model_copy(update={"store": None})
    coordinator = processes(
        CoordinatorDeployment,
        of_model(COORDINATOR_NAME, model.name),
        actor=coordinator_place(config),
        health_check_period_s=1.0,  # short, because all other processes wait for the coordinator
        stays_s=COORDINATOR_STAYS_S,
    ).bind(service, model.run_dir, model.trust, head, model.name, others if service.turns is not None else ())
    engines = [
        processes(
            EngineReplicaDeployment,
            engine_deployment(config, entry, model.name),
            actor=engine_actor_options(config, entry),
            placement=engine_placement(config, entry),
            ends_within_s=10.0 if entry.max_replicas is None else ENDS_TURNS_WITHIN_S,
        ).bind(stateless, model.run_dir, model.trust, index, model.name)
        for index, entry in enumerate(config.entries)
    ]
    return [coordinator, *engines]


def store_elsewhere(config: ServiceConfig, run_dir: Path) -> ServiceConfig:
    """Return the config with a store URL that other nodes can use, too. Raises InvalidRequest."""
    if config.cluster is None or config.store is None:
        return config
    url = where_the_run_is(config, url_elsewhere, config, run_dir)
    return config.model_copy(update={"store": SecretStr(url)})


def begun_run(config: ServiceConfig, run_dir: Path) -> Trust:
    """Start or continue a run in its directory. Return the secret and certificates of its processes.

    Raises InvalidRequest.
    """
    check_store(config, run_dir)
    # Load optional packages now, so that a missing or misconfigured one is an error before any process starts.
    configured(config)
    registered_routes(config.routes)
    if config.workers.isolation != "none":
        parts.load(parts.TRAJECTORY_RUNNERS, config.workers.isolation, param="workers.isolation")
    followed_store(config, run_dir)
    trust = run_trust(config, run_dir)
    keep_config(config, run_dir)
    keep_tokenizer(config, run_dir)
    keep_run(config, run_dir)
    return trust
