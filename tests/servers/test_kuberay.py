"""The KubeRay manifest: its fields exist, and its parts are consistent with each other and with the service."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import SecretStr
from typer.testing import CliRunner

from agentloop.storage.home import shown_url
from agentloop_servers.cli.commands import app as command
from agentloop_servers.config.service import IMPORT_PATH, ServiceConfig
from agentloop_servers.run.store import check_store, keep_url, open_store, url_elsewhere
from tests.support.service.postgres_server import PostgresServer
from tests.support.service.whole_service import SECRET, simulated_config

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "servers" / "kuberay.yaml"
FIELDS = yaml.safe_load((Path(__file__).parent / "kuberay_fields.yaml").read_text())
PARTS = {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text())}

QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGT]i?)?")
OF_TYPE = {
    "string": lambda given: isinstance(given, str),
    "integer": lambda given: type(given) is int,
    "boolean": lambda given: isinstance(given, bool),
    "port": lambda given: isinstance(given, (int, str)),
    "quantity": lambda given: isinstance(given, str) and QUANTITY.fullmatch(given) is not None,
}


def faults(given: Any, asked: Any, at: str = "") -> Iterator[str]:
    """Yield each path at which a document does not match the fields file."""
    if isinstance(asked, list):
        if not isinstance(given, list):
            yield f"{at}: no list"
            return
        for number, item in enumerate(given):
            yield from faults(item, asked[0], f"{at}[{number}]")
    elif isinstance(asked, dict):
        if not isinstance(given, dict):
            yield f"{at}: no mapping"
            return
        known = {name.removesuffix("!"): of_field for name, of_field in asked.items()}
        for name, value in given.items():
            if (of_field := known.get(name, known.get("*"))) is None:
                yield f"{at}.{name}: no such field"
            else:
                yield from faults(value, of_field, f"{at}.{name}")
        yield from (f"{at}.{name[:-1]}: missing" for name in asked if name[-1] == "!" and name[:-1] not in given)
    elif not (OF_TYPE[asked](given) if asked in OF_TYPE else given in asked.split("|")):
        yield f"{at}: {given!r} is not {asked}"


def changed(*place: str | int, to: Any) -> dict[str, Any]:
    """Return the RayService with one value changed or added."""
    document: Any = yaml.safe_load(yaml.safe_dump(PARTS["RayService"]))
    inner = document
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = to
    return document


CLUSTER = PARTS["RayService"]["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]
(GROUP,) = CLUSTER["workerGroupSpecs"]
WORKER = GROUP["template"]
SERVED = yaml.safe_load(PARTS["RayService"]["spec"]["serveConfigV2"])
CONFIG = ServiceConfig.model_validate(SERVED["applications"][0]["args"])


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return only


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_each_field_is_one_that_there_is(kind):
    assert list(faults(PARTS[kind], FIELDS[kind])) == []


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (("spec", "serveConfig"), "", ".spec.serveConfig: no such field"),
        (
            ("spec", "rayClusterConfig", "headGroupSpec"),
            {},
            ".spec.rayClusterConfig.headGroupSpec.template: missing",
        ),
        (("spec", "upgradeStrategy", "type"), None, ".spec.upgradeStrategy.type: None is not NewCluster|"),
        (("spec", "rayClusterConfig", "rayVersion"), 2.6, ".spec.rayClusterConfig.rayVersion: 2.6 is not string"),
    ],
)
def test_a_wrong_field_is_found(place, value, fault):
    found, *_ = faults(changed(*place, to=value), FIELDS["RayService"])
    assert found.startswith(fault)


def test_it_names_no_image_and_no_secret_of_anyones():
    for template in (HEAD, WORKER):
        assert container(template)["image"] == "YOUR_IMAGE"  # upper case is invalid in every registry
    names = set(re.findall(r"YOUR_\w+", MANIFEST.read_text())) - {"YOUR_"}
    assert names == {"YOUR_IMAGE", "YOUR_MODEL", "YOUR_MODELS"}
    assert "Secret" not in PARTS
    docs = (ROOT / "docs" / "guides" / "cluster.md").read_text()
    secrets = {CLUSTER["authOptions"]["secretName"]}
    secrets |= {one["secret"]["secretName"] for one in HEAD["spec"]["volumes"] if "secret" in one}
    for one in container(HEAD)["env"]:
        if "secretKeyRef" in one.get("valueFrom", {}):
            secrets.add(one["valueFrom"]["secretKeyRef"]["name"])
    assert secrets == {"agentloop-ray", "agentloop-keys", "agentloop-postgres"}
    assert all(f"kubectl create secret generic {name} " in docs for name in secrets)


def test_its_ray_is_the_one_that_is_installed():
    assert CLUSTER["rayVersion"] == ray.__version__
    assert f"ray[serve]=={ray.__version__}" in (ROOT / "pyproject.toml").read_text()


def test_its_service_is_that_of_the_cluster_config():
    own = {"model": "/models/YOUR_MODEL", "run_dir": str(CONFIG.run_dir), "cluster": {"min_nodes": 3}}
    shipped = yaml.safe_load((ROOT / "servers" / "cluster.yaml").read_text())
    shipped["applications"][0]["args"] |= own
    assert shipped == SERVED
    assert SERVED["applications"][0]["import_path"] == IMPORT_PATH


def test_the_port_is_the_same_everywhere():
    (port,) = PARTS["Service"]["spec"]["ports"]
    assert port["targetPort"] == CONFIG.port
    assert container(WORKER)["ports"] == [{"name": "public", "containerPort": CONFIG.port}]
    assert container(WORKER)["readinessProbe"]["httpGet"] == {"path": "/health", "port": CONFIG.port}
    assert CONFIG.host == "0.0.0.0"
    labels = WORKER["metadata"]["labels"]
    assert PARTS["Service"]["spec"]["selector"].items() <= labels.items()


def test_only_the_public_port_is_open_to_others():
    policy = PARTS["NetworkPolicy"]["spec"]
    for template in (HEAD, WORKER):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    open_to_all = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": CONFIG.port}]]


def test_the_service_waits_for_all_nodes_and_keeps_the_run_on_a_claim():
    assert CONFIG.cluster is not None
    assert CONFIG.cluster.min_nodes == 1 + GROUP["replicas"]
    assert GROUP["replicas"] == GROUP["minReplicas"] == GROUP["maxReplicas"]
    assert "readinessProbe" not in container(HEAD)  # KubeRay deploys once the head is ready
    assert CONFIG.num_replicas <= GROUP["replicas"] * int(
        container(WORKER)["resources"]["limits"]["nvidia.com/gpu"]
    )
    for template, kind in ((HEAD, "persistentVolumeClaim"), (WORKER, "emptyDir")):
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        mounts = {one["mountPath"]: one["name"] for one in container(template)["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert kind in volumes[mounts[str(Path(str(CONFIG.run_dir)).parent)]]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = next(one for one in HEAD["spec"]["volumes"] if one["name"] == "run")["persistentVolumeClaim"]
    assert claim["claimName"] == PARTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert "agentloop-postgres" not in yaml.safe_dump(WORKER)


@pytest.mark.parametrize(("hook", "is_undone"), [("preStop", False), ("postStart", True)])
def test_its_hooks_are_commands_of_ours(hook, is_undone, tmp_path):
    stub = tmp_path / "agentloop"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    shell = container(WORKER)["lifecycle"][hook]["exec"]["command"]
    said = subprocess.run(
        shell,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.1.2.3"},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = said.stdout.split()
    assert arguments[:2] == ["drain", "10.1.2.3"]
    assert ("--undo" in arguments) is is_undone
    nobody = "http://127.0.0.1:9"
    answer = CliRunner().invoke(command, [*arguments[:-1], nobody], env={"AGENTLOOP_ADMIN_KEY": "admin"})
    assert answer.exit_code == 1, answer.output  # not 2, which means an invalid command line
    assert "127.0.0.1:9" in answer.output


async def test_the_stores_url_may_come_from_a_secret(postgres_server: PostgresServer, tmp_path, monkeypatch):
    told = re.search(r"# store: (\S+)", MANIFEST.read_text())
    assert told is not None
    env = {one["name"]: one.get("value") for one in container(HEAD)["env"]}
    service = tmp_path / Path(env["PGSERVICEFILE"]).name
    service.write_text(
        f"[agentloop]\nhost=127.0.0.1\nport={postgres_server.port}\ndbname=postgres\nuser=agentloop\npassword=x\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    run_dir = tmp_path / postgres_server.new_name()
    run_dir.mkdir()
    config = simulated_config(store=told[1])
    check_store(config, run_dir)
    keep_url(config, run_dir)
    store = open_store(config, run_dir, SECRET.key)
    try:
        assert await store.take_over() == 1
    finally:
        await store.close()
    assert postgres_server.execute("SELECT to_regclass('leases') IS NOT NULL", run_dir.name) == [(True,)]
    # The other pods, whose ingress processes write sessions there, do not mount it.
    url = url_elsewhere(config, run_dir)
    monkeypatch.delenv("PGSERVICEFILE")
    assert "service" not in url
    check_store(config.model_copy(update={"store": SecretStr(url)}), tmp_path / postgres_server.new_name())
    assert shown_url(url) == f"postgresql://127.0.0.1:{postgres_server.port}/postgres"
