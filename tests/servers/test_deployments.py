"""The application as it is passed to Serve, without a Ray."""

from __future__ import annotations

from pathlib import Path

from ray.serve._private.build_app import build_app
from ray.serve.deployment import deployment_to_schema

from agentloop_servers.app import application
from agentloop_servers.config.service import ServiceConfig

CONFIG = Path(__file__).parents[2] / "servers" / "simulated.yaml"
MAX_UNNOTICED_S = {"Coordinator": 1.0}  # all other processes wait for it
OTHERS_S = 2.0


def test_a_process_that_died_is_missed_soon(tmp_path: Path) -> None:
    """Serve detects a death when it checks the process's health."""
    app = application(ServiceConfig.load(CONFIG), tmp_path)
    built = build_app(app, name="agentloop", make_deployment_handle=lambda deployment, name: None)
    assert {one.name for one in built.deployments} == {"Coordinator", "EngineReplica", "AgentLoopWorker", "Ingress"}
    for one in built.deployments:
        assert deployment_to_schema(one).health_check_period_s <= MAX_UNNOTICED_S.get(one.name, OTHERS_S)
