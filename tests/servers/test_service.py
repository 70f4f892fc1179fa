"""The whole service on a local Ray, with simulated engines: kills, restarts, interrupts, two services at a time."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import aiohttp
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import CheckpointUnreadable, Conflict, InvalidRequest, NotFound
from agentloop.types import Limits, Message, RolloutTask
from tests.servers.processes import descendants, processes_with, stop_process
from tests.servers.shared_service import Service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "servers" / "simulated.yaml"
V1 = ROOT / "examples" / "tiny_policy" / "v1"


def tasks(count: int, prefix: str = "t", **fields: object) -> list[RolloutTask]:
    limits = Limits(max_tokens_per_turn=64, timeout_s=120)
    given = {"messages": (Message("user", "What is 2 + 3?"),), "tools": ("calculator",), "limits": limits}
    return [RolloutTask(task_id=f"{prefix}{n}", **{**given, **fields}) for n in range(count)]  # type: ignore[arg-type]


@pytest.fixture
def service(shared_service: Service) -> Service:
    return shared_service


@pytest.fixture
def url(service: Service) -> str:
    return service.url


@pytest.fixture
def client(service: Service) -> RolloutClient:
    return service.client


async def collect(rollout) -> dict[tuple[str, int], object]:
    found = {}
    async with asyncio.timeout(120):
        async for trajectory in rollout:
            key = (trajectory.task_id, trajectory.sample_index)
            assert key not in found, f"{key} delivered twice"
            found[key] = trajectory
    return found


async def test_every_task_comes_back_once(client):
    found = await collect(await client.submit(tasks(20), num_samples=3))
    assert set(found) == {(f"t{n}", sample) for n in range(20) for sample in range(3)}
    assert all(trajectory.is_complete for trajectory in found.values())


async def test_the_ten_lines_of_the_readme(client, url, capsys):
    example = importlib.import_module("examples.01_ten_lines")
    version = ((await client.status()).weight_version or 0) + 1
    async with asyncio.timeout(120):
        await example.main(url, version)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33
    assert f"now at version {version}" in lines[-1]


GCS_ADDRESS = r"--gcs-address=(\S+)"  # in the command lines of Ray's processes
# Like a client elsewhere on the network: without the token that this user's Ray has.
ASK_FOR_NODES = """
import sys, grpc
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(grpc.insecure_channel(sys.argv[1]))
try:
    print(len(nodes.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=30).node_info_list))
except grpc.RpcError as error:
    print(error.code().name)
"""


async def test_62_a_ray_of_the_services_own_answers_nobody_without_its_token(service):
    [address, *_] = re.findall(GCS_ADDRESS, " ".join(descendants(service.pid).values()))
    stranger = [sys.executable, "-c", ASK_FOR_NODES, address]
    ran = await asyncio.to_thread(subprocess.run, stranger, capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.strip() == "UNAUTHENTICATED"


async def test_token_in_token_out(client):
    generation = await client.generate([1, 2, 3], max_tokens=8, temperature=0.0)
    assert len(generation.token_ids) == len(generation.logprobs) == 8
    again = await client.generate([1, 2, 3], max_tokens=8, temperature=0.0)
    assert again.token_ids == generation.token_ids


async def test_an_update_under_load_loses_nothing(client):
    status = await client.status()
    version = (status.weight_version or 0) + 1
    rollout = await client.submit(tasks(60, limits=Limits(max_tokens_per_turn=600)), num_samples=2)
    report = await client.update_weights(str(V1), version=version)
    found = await collect(rollout)
    assert len(found) == 120
    assert report.version == version
    assert len(report.replicas) == 2
    assert (await client.status()).weight_version == version


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ("no_such_tool",)}, "tools"),
        ({"loop": "no_such_loop"}, "loop"),
        ({"reward": "no_such_reward"}, "reward"),
    ],
)
async def test_a_task_that_cannot_run_is_refused_with_its_field(client, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        await client.submit(tasks(1, **fields))
    assert param in (caught.value.param or "")
    assert len(await collect(await client.submit(tasks(2)))) == 2


async def test_bad_requests_do_not_disturb_a_rollout(client, url):
    rollout = await client.submit(tasks(40))
    bodies = [b"{", b"", b"[]", b"null", b'{"tasks": NaN}', b'{"token_ids": [1e999]}', b"\xff\xfe", b"{" * 5000]
    async with aiohttp.ClientSession() as session:
        for path in ("/rollouts", "/generate", "/admin/weights"):
            for body in bodies:
                headers = {"content-type": "application/json"}
                async with session.post(url + path, data=body, headers=headers) as answer:
                    assert answer.status == 400, (path, body)
                    assert (await answer.json())["error"]["code"]
    assert len(await collect(rollout)) == 40


async def test_a_prompt_longer_than_the_context_is_a_record_of_its_own(client):
    too_long = tasks(1, "long", messages=(Message("user", "word " * 5000),))
    found = await collect(await client.submit(too_long + tasks(5)))
    assert found["long0", 0].stop_reason == "prompt_too_long"
    assert not found["long0", 0].is_complete
    assert all(found[f"t{n}", 0].is_complete for n in range(5))
    with pytest.raises(InvalidRequest, match="context"):
        await client.generate([1] * 100_000, max_tokens=1)


async def test_weights_that_cannot_be_read_change_nothing(client, tmp_path):
    before = await client.status()
    for directory in (V1.parent / "no_such_folder", tmp_path):
        with pytest.raises(InvalidRequest):
            await client.update_weights(str(directory), version=1000)
    with pytest.raises((CheckpointUnreadable, InvalidRequest)):
        await client.update_weights(str(V1.parent), version=1000)
    served = 0 if before.weight_version is None else before.weight_version
    with pytest.raises((Conflict, InvalidRequest)):
        await client.update_weights(str(V1 if served == 0 else V1.parent / "v0"), version=served)
    after = await client.status()
    assert (after.weight_version, after.is_ready) == (before.weight_version, True)
    assert len(await collect(await client.submit(tasks(2)))) == 2


async def test_cancel_gives_every_trajectory_its_record(client):
    rollout = await client.submit(tasks(50, limits=Limits(max_tokens_per_turn=2000)), num_samples=4)
    await rollout.cancel()
    assert len(await collect(rollout)) == 200
    with pytest.raises(NotFound):
        await client.cancel("no-such-rollout")


PARTS = ("EngineReplica", "AgentLoopWorker", "Coordinator")


@pytest.mark.parametrize("kinds", [PARTS, *(pytest.param((kind,), marks=pytest.mark.long) for kind in PARTS)])
async def test_a_killed_part_costs_no_accepted_task(service, client, kinds):
    """One process of each kind is killed at the same time."""
    rollout = await client.submit(tasks(60, limits=Limits(max_tokens_per_turn=800, timeout_s=120)), num_samples=2)
    for kind in kinds:
        os.kill(service.deployed(kind)[0], signal.SIGKILL)
    found = await collect(rollout)
    assert set(found) == {(f"t{n}", sample) for n in range(60) for sample in range(2)}
    assert all(trajectory.is_complete for trajectory in found.values())
    await service.until_whole()


async def heard_of(service: Service) -> set[str]:
    """Return the processes that `process_up` lists, including silent ones."""
    async with service.http.get(f"{service.url}/metrics") as answer:
        return set(re.findall(r'^agentloop_process_up{process="(.*?)"}', await answer.text(), re.MULTILINE))


OTHER_PARTS = ("EngineReplica", "Coordinator", "Ingress")


@pytest.mark.parametrize(
    "kind", ["AgentLoopWorker", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHER_PARTS)]
)
async def test_a_part_that_is_told_to_end_gives_back_what_it_has_and_ends(service, client, kind):
    rollout = await client.submit(tasks(60, limits=Limits(max_tokens_per_turn=800, timeout_s=120)), num_samples=2)
    async with asyncio.timeout(60):
        while (await rollout.status()).num_running < 50:
            await asyncio.sleep(0.1)
    num_before, victim = len(service.events("worker_left")), service.deployed(kind)[0]
    heard_before = await heard_of(service)
    os.kill(victim, signal.SIGTERM)
    async with asyncio.timeout(60):
        while victim in service.deployed(kind):
            await asyncio.sleep(0.2)
    if kind in ("AgentLoopWorker", "EngineReplica"):  # replacements of the others reuse their names
        assert len(heard_before - await heard_of(service)) == 1, "it said goodbye"
    left = service.events("worker_left")[num_before:]
    assert [event["num_running"] > 0 for event in left] == [True] * (kind == "AgentLoopWorker")
    found = await collect(rollout)
    assert set(found) == {(f"t{n}", sample) for n in range(60) for sample in range(2)}
    assert all(trajectory.is_complete and trajectory.attempt <= len(left) for trajectory in found.values())
    assert service.events("not_closed") == []
    await service.until_whole()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "found_within_s"), [("AgentLoopWorker", 30.0), ("EngineReplica", 60.0)])
async def test_a_part_that_stands_still_for_good_is_replaced(service, client, kind, found_within_s):
    rollout = await client.submit(tasks(60, limits=Limits(max_tokens_per_turn=800, timeout_s=120)), num_samples=2)
    victim = service.deployed(kind)[0]
    stop_process(victim)
    async with asyncio.timeout(2 * found_within_s):  # the bound is for idle cores
        while victim in service.deployed(kind):
            await asyncio.sleep(0.5)
    found = await collect(rollout)
    assert set(found) == {(f"t{n}", sample) for n in range(60) for sample in range(2)}
    assert all(trajectory.is_complete for trajectory in found.values())
    await service.until_whole()


def start(marker: str, out: Path, count: int = 400) -> subprocess.Popen[str]:
    arguments = ["rollout", "--config", str(CONFIG), "--out", str(out), "--samples", str(count)]
    return subprocess.Popen(
        [sys.executable, "-m", "agentloop_servers.cli", *arguments],
        cwd=ROOT,
        text=True,
        env={**os.environ, marker: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def command_serve(marker: str, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Run a service in a separate process. Returns its output until it was ready or ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentloop_servers.cli", "serve", *arguments],
        cwd=ROOT,
        text=True,
        env={**os.environ, marker: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("chat"):
            break
    return process, lines


def url_in(lines: list[str]) -> str:
    (ready,) = [line for line in lines if line.startswith("ready at")]
    return ready.split()[2]


@pytest.mark.long
async def test_a_run_goes_on_after_its_processes_were_killed(tmp_path):
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    config = tmp_path / "any_port.yaml"
    config.write_text(CONFIG.read_text().replace("port: 8000", "port: 0"))
    process, lines = command_serve(marker, "--config", str(config), "--out", str(tmp_path))
    (run_dir,) = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    slow = {"limits": Limits(max_tokens_per_turn=1500, timeout_s=300)}
    async with RolloutClient(url_in(lines)) as client:
        await client.pause(reason="a look at the rewards")
        rollout = await client.submit(tasks(40, **slow), num_samples=2)
    second, lines = command_serve(f"{marker}_2", "--resume", str(run_dir))
    second.communicate(timeout=60)
    assert (second.returncode, "still running in" in lines[-1]) == (1, True), lines
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert processes_with(marker, grace_s=90.0) == []

    process, lines = command_serve(marker, "--resume", str(run_dir))
    assert any(line.startswith("going on") for line in lines), lines
    async with RolloutClient(url_in(lines)) as client:
        status = await client.status()
        assert (status.is_paused, status.pause_reason) == (True, "a look at the rewards")
        await client.resume()
        found = []
        async with asyncio.timeout(120):
            for rollout_id in rollout.rollout_ids:
                cursor, is_done = 0, False
                while not is_done:
                    page = await client.read(rollout_id, after=cursor, wait_s=10.0)
                    found += [(one.task_id, one.sample_index) for one in page.trajectories]
                    cursor, is_done = page.cursor, page.status.is_done and not page.trajectories
        assert len(found) == 80
        assert set(found) == {(f"t{n}", sample) for n in range(40) for sample in range(2)}
        await client.submit(tasks(400, **slow), num_samples=2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert f"agentloop serve --resume {run_dir}" in output
    assert processes_with(marker) == []


@pytest.mark.parametrize(
    "after_s", [pytest.param(1.0, marks=pytest.mark.long), 4.0, pytest.param(15.0, marks=pytest.mark.long)]
)
def test_ctrl_c_leaves_no_process(tmp_path, after_s):
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    process = start(marker, tmp_path)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole foreground group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert processes_with(marker) == []
    assert "Traceback" not in output


@pytest.mark.long
def test_a_service_that_cannot_start_says_why(tmp_path):
    config = tmp_path / "broken.yaml"
    config.write_text(
        CONFIG.read_text().replace("capacity: 256", 'capacity: 256\n        tools: {mine: "no.such:tool"}')
    )
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    process = subprocess.run(
        [sys.executable, "-m", "agentloop_servers.cli", "rollout", "--config", str(config), "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, marker: "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1
    assert "no.such" in process.stdout + process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    assert processes_with(marker) == []


@pytest.mark.long
def test_two_rollouts_side_by_side(tmp_path):
    markers = [f"AGENTLOOP_TEST_{uuid.uuid4().hex}" for _ in range(2)]
    both = [start(marker, tmp_path / str(n), count=1) for n, marker in enumerate(markers)]
    for process in both:
        output, _ = process.communicate(timeout=500)  # two services start at once, possibly on busy cores
        assert process.returncode == 0, output
    assert [processes_with(marker) for marker in markers] == [[], []]
