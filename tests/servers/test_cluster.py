"""A service on the nodes of a cluster: the nodes, the required trust, and addresses."""

from __future__ import annotations

import asyncio
from collections import defaultdict, namedtuple

import psutil
import pytest
import ray

from agentloop.errors import InvalidRequest
from agentloop_servers import local
from agentloop_servers.cluster import nodes as cluster
from agentloop_servers.config.service import ClusterSettings, ServiceConfig
from agentloop_servers.http.auth import Keys
from agentloop_servers.net.tcp import listening_socket
from agentloop_servers.processes.checks import check_hosts, check_resources
from agentloop_servers.processes.engine_parts import engine_actor_options, engine_placement
from agentloop_servers.processes.settings import sized

Address = namedtuple("Address", "address")
KEYS = Keys.of(["user"], "admin")


def service(**fields):
    return ServiceConfig.model_validate({"model": "examples/tiny_policy/v0", **fields})


@pytest.fixture
def nodes(monkeypatch):
    """The nodes that Ray reports; a test appends to them."""
    found = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.0.5")
    interfaces = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["10.1.0.5", "fe80::1%eth0"],
        "ib0": ["192.168.7.5", "fd00::5"],
    }
    addresses = {name: [Address(one) for one in of_name] for name, of_name in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    return found


def test_one_node_is_one_host_whatever_the_config_says(nodes):
    config = cluster.for_nodes(service(cluster={"network": "10.0.0.0/8"}))
    assert config.cluster is None
    assert cluster.node_address(config) == "127.0.0.1"
    assert cluster.node_address(config.model_copy(update={"host": "::1"})) == "::1"
    assert cluster.where_the_run_is(config, lambda: "here") == "here"
    cluster.check_trust(config, Keys())


def test_several_nodes_are_a_cluster_also_where_the_config_names_none(nodes):
    nodes.append({"Alive": True})
    assert cluster.for_nodes(service()).cluster == ClusterSettings()
    settings = {"network": "10.0.0.0/8"}
    assert cluster.for_nodes(service(cluster=settings)).cluster == ClusterSettings(**settings)
    assert cluster.num_nodes() == 2


@pytest.mark.parametrize(
    ("network", "address"), [(None, "10.1.0.5"), ("192.168.0.0/16", "192.168.7.5"), ("fd00::/8", "fd00::5")]
)
def test_a_nodes_address_is_rays_or_that_in_the_network(nodes, network, address):
    assert cluster.node_address(service(cluster={"network": network})) == address


def test_a_node_without_an_address_in_the_network_is_named_with_those_it_has(nodes):
    with pytest.raises(
        InvalidRequest, match=r"node 10\.1\.0\.5 has no address in 172\.16\.0\.0/12; it has 10\.1\.0\.5, 192"
    ):
        cluster.node_address(service(cluster={"network": "172.16.0.0/12"}))
    with pytest.raises(ValueError, match="network"):
        service(cluster={"network": "everywhere"})


def test_an_engines_libraries_take_the_interface_of_the_network(nodes, monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", cluster.ADDRESS_VARIABLE):
        monkeypatch.setenv(name, "")  # restores the variable after the test
        monkeypatch.delenv(name)
    environment = cluster.os.environ
    cluster.prepare_engine_network(service())
    assert cluster.ADDRESS_VARIABLE not in environment
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the operator's")
    cluster.prepare_engine_network(service(cluster={"network": "192.168.0.0/16"}))
    found = [environment[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", cluster.ADDRESS_VARIABLE)]
    assert found == ["ib0", "the operator's", "192.168.7.5"]


@pytest.mark.parametrize("keys", [Keys(), Keys.of(["user"]), Keys.of([], "admin")])
def test_several_nodes_need_both_keys(nodes, keys, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    nodes.append({"Alive": True})
    with pytest.raises(InvalidRequest, match="a service on 2 nodes needs a user key and an admin key"):
        cluster.check_trust(service(cluster={}), keys)
    cluster.check_trust(service(cluster={}), KEYS)


def test_several_nodes_need_rays_token(nodes, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(InvalidRequest, match="start every node with RAY_AUTH_MODE=token"):
        cluster.check_trust(service(cluster={}), KEYS)


def test_every_node_has_a_worker_and_an_engines_share_of_processes(tmp_path):
    assert sized(service(engine={"kind": "simulated"}), tmp_path, num_nodes=3).workers.replicas == 3
    one = sized(service(replicas=8), tmp_path, num_cpus=64)
    two = sized(service(replicas=16), tmp_path, num_cpus=64, num_nodes=2)
    assert (two.workers.replicas, two.num_ingress) == (2 * (one.workers.replicas or 0), 2 * one.num_ingress)


WIDE = {"tensor_parallel_size": 8, "hosts": 2}


def test_an_engine_over_hosts_has_a_bundle_on_each():
    config = service(engine=WIDE)
    assert engine_placement(config, config.entries[0]) == {
        "num_replicas": 1,
        "placement_group_bundles": [{"GPU": 4.0, "CPU": 1.0}] * 2,
        "placement_group_strategy": "STRICT_SPREAD",
    }
    on_cpu = {"device": "cpu", "kv_cache_mib": 64, "num_cpus": 0.5, "tensor_parallel_size": 3, "hosts": 3}
    config = service(engine=on_cpu)
    assert engine_placement(config, config.entries[0])["placement_group_bundles"] == [{"CPU": 0.5}] * 3
    config = service(engine={"tensor_parallel_size": 8})
    assert engine_placement(config, config.entries[0]) == {"num_replicas": 1}


NO_LABELS = defaultdict(dict)


def test_an_engine_over_hosts_asks_for_nodes_that_have_its_share():
    four, two = {"GPU": 4.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 8.0}
    config = service(engine=WIDE)
    check_hosts(config, {"a": four, "b": two, "c": four}, NO_LABELS)
    with pytest.raises(InvalidRequest) as refused:
        check_hosts(config, {"10.0.0.1": four, "10.0.0.2": two}, NO_LABELS)
    there = "10.0.0.1 4 GPUs 8 CPUs, 10.0.0.2 2 GPUs 8 CPUs"
    assert refused.value.message == f"engine vllm: no 2 nodes with 4 free GPUs and 1 free CPUs (nodes: {there})"
    with pytest.raises(InvalidRequest, match="this host alone"):
        check_hosts(config, {}, NO_LABELS)
    pair = service(engine=WIDE, replicas=2)
    check_hosts(pair, dict.fromkeys("abcd", four), NO_LABELS)
    check_hosts(pair, {"a": {"GPU": 8.0, "CPU": 2.0}, "b": four, "c": four}, NO_LABELS)
    with pytest.raises(InvalidRequest, match=r"nodes: a 0 GPUs 7 CPUs, b 0 GPUs 7 CPUs, c 4 GPUs 8 CPUs"):
        check_hosts(pair, dict.fromkeys("abc", four), NO_LABELS)
    check_hosts(service(engine={"tensor_parallel_size": 8}), {}, NO_LABELS)
    with pytest.raises(InvalidRequest, match=r"require 16 GPUs \(vllm 4 x 4\), but the Ray cluster has 8"):
        check_resources(pair, {"GPU": 8.0, "CPU": 8.0})


UNLIKE = [
    {"name": "big", "labels": {"zone": "a"}, "replicas": 2, "accelerator_type": "H100"},
    {"name": "small", "labels": {"zone": "b"}, "replicas": 1},
]


def test_engines_are_on_nodes_with_their_labels():
    gpus = {"GPU": 1.0, "CPU": 8.0}
    config = service(engines=UNLIKE)
    wanted = {"zone": "a", "ray.io/accelerator-type": "H100"}
    options = [engine_actor_options(config, entry).get("label_selector") for entry in config.entries]
    assert options == [wanted, {"zone": "b"}]
    free, labels = dict.fromkeys("123", gpus), {"1": wanted, "2": wanted, "3": {"zone": "b"}}
    check_hosts(config, free, labels)
    check_hosts(config, {}, {})  # Ray has not started yet
    with pytest.raises(InvalidRequest) as refused:
        check_hosts(config, free, {**labels, "2": {"zone": "a"}})
    asked = "zone=a and ray.io/accelerator-type=H100 and 1 free GPUs and 1 free CPUs"
    there = (
        "1 zone=a ray.io/accelerator-type=H100 0 GPUs 7 CPUs, 2 zone=a ray.io/accelerator-type= 1 GPUs 8 CPUs,"
        " 3 zone=b ray.io/accelerator-type= 1 GPUs 8 CPUs"
    )
    assert refused.value.message == f"engine big: no node with {asked} (nodes: {there})"


def test_an_engine_over_hosts_is_on_nodes_with_its_labels():
    config = service(engine={**WIDE, "labels": {"zone": "a"}})
    placement = engine_placement(config, config.entries[0])
    assert placement["placement_group_bundle_label_selector"] == [{"zone": "a"}] * 2
    assert "label_selector" not in engine_actor_options(config, config.entries[0])
    four = {address: {"GPU": 4.0, "CPU": 8.0} for address in "123"}
    check_hosts(config, four, {"1": {"zone": "a"}, "2": {}, "3": {"zone": "a"}})
    with pytest.raises(InvalidRequest, match="no 2 nodes with zone=a and 4 free GPUs"):
        check_hosts(config, four, {"1": {"zone": "a"}, "2": {}, "3": {}})


def test_what_nodes_have_and_what_is_free(nodes, monkeypatch):
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: {"n1": {"GPU": 1.0}})
    nodes[:] = [
        {"Alive": True, "NodeID": "n1", "NodeManagerAddress": "10.1.0.5", "Resources": {"GPU": 8.0}},
        {"Alive": True, "NodeID": "n2", "NodeManagerAddress": "10.1.0.6", "Resources": {"GPU": 4.0}},
    ]
    assert cluster.node_resources() == {"10.1.0.5": {"GPU": 8.0}, "10.1.0.6": {"GPU": 4.0}}
    assert cluster.node_resources(only_free=True) == {"10.1.0.5": {"GPU": 1.0}, "10.1.0.6": {}}


def test_with_a_database_the_head_is_where_a_coordinator_rather_is(nodes):
    nodes[:] = [{"Alive": True, "NodeID": name, "Resources": {"CPU": 4.0}} for name in ("h", "w")]
    resources = nodes[0]["Resources"]
    resources["node:__internal_head__"] = 1.0
    assert cluster.coordinator_place(service()) is None
    on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    assert cluster.coordinator_place(service(cluster={})) == on_head
    stored = service(cluster={}, store="postgresql://db/x")
    # Ray omits a resource that a node does not have, or reports 0
    for num_cpus, wanted in ((4.0, "h"), (0.0, "!h")):
        resources["CPU"] = num_cpus
        place = cluster.coordinator_place(stored)
        assert place["label_selector"] == {"ray.io/node-id": wanted}
        assert place["fallback_strategy"] == [{"label_selector": {}}]
    del resources["CPU"]
    assert cluster.coordinator_place(stored) == place


async def test_a_coordinator_is_found_once_it_listens(monkeypatch):
    kept = {}
    monkeypatch.setattr(cluster, "_internal_kv_put", lambda key, value, **_: kept.update({key: value}))
    monkeypatch.setattr(cluster, "_internal_kv_get", lambda key, **_: kept.get(key))
    finding = asyncio.create_task(cluster.find_coordinator("app"))
    with listening_socket("127.0.0.1") as gone:
        cluster.announce_coordinator("app", f"http://127.0.0.1:{gone.getsockname()[1]}")
    await asyncio.sleep(0.5)
    assert not finding.done()
    with listening_socket("127.0.0.1") as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        cluster.announce_coordinator("app", url)
        cluster.announce_coordinator("another", "http://127.0.0.1:1")
        assert await asyncio.wait_for(finding, 60.0) == url


async def test_a_config_that_is_refused_leaves_a_clusters_running_service_alone(nodes, monkeypatch, tmp_path):
    deleted = []
    monkeypatch.setattr(local, "join_ray", lambda address: None)
    monkeypatch.setattr(local.serve, "delete", deleted.append)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(InvalidRequest, match="no model at"):
        async with local.running_service(service(model="nowhere", port=0), tmp_path, address="auto"):
            pass
    assert deleted == []


def test_a_service_waits_for_its_nodes_and_says_what_there_is(monkeypatch):
    config = service(cluster={"min_nodes": 3})
    with pytest.raises(InvalidRequest, match="the Ray cluster has 1 of 3 nodes"):
        cluster.for_nodes(config)
    seen = iter([1, 2, 3, 3])
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "num_nodes", lambda: next(seen))
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    assert cluster.for_nodes(config).cluster is not None
