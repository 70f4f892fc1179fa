"""The Sandboxes port: one contract for all adapters; images; sandboxes that wait, are lost, or are left behind."""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentloop.errors import InvalidRequest, ToolError, ToolLost
from agentloop.types import StopReason
from agentloop_tools.sandbox import Sandbox, Sandboxes, SandboxLimits, SandboxSource
from agentloop_tools.sandbox.bubblewrap import Bubblewrap, refusal
from agentloop_tools.sandbox.commands import tar_of
from agentloop_tools.sandbox.container import Containers
from agentloop_tools.sandbox.e2b import E2B
from agentloop_tools.sandbox.kubernetes import Kubernetes
from agentloop_tools.sandbox.pool import WarmSandboxes
from agentloop_tools.shell import ShellTool
from tests.parts.tools.e2b_server import KEY, FakeE2B
from tests.parts.tools.kubernetes_server import POOL, FakeCluster
from tests.support.endpoint.front_door import serving
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker, task
from tests.support.service import podman as podman_service

WHY_NOT = refusal()
WHY_NO_PODMAN = podman_service.why_not()
isolates = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
LIMITS = SandboxLimits(run_s=20.0, max_folder_bytes=8 << 20)


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    if WHY_NO_PODMAN is not None:
        pytest.skip(f"needs containers (apt: podman runc busybox-static): {WHY_NO_PODMAN}")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    with podman_service.podman(folder) as (path, command):
        limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096", "--network=none"]
        ran = subprocess.run(
            [*command, "run", "--rm", *limits, podman_service.IMAGE, "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            pytest.skip(f"needs a host where podman runs: {ran.stderr.strip()[-300:]}")
        yield path
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["bubblewrap", "podman", "e2b", "kubernetes"])
async def sandboxes(request, tmp_path: Path) -> AsyncIterator[Sandboxes]:
    if request.param == "podman":
        made: Sandboxes = Containers(request.getfixturevalue("socket"), image=podman_service.IMAGE, max_life_s=120)
        yield made
        await made.close()
    elif WHY_NOT is not None:
        pytest.skip(f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
    elif request.param == "bubblewrap":
        made = Bubblewrap()
        yield made
        await made.close()
    elif request.param == "kubernetes":
        cluster = FakeCluster(tmp_path)
        async with TestServer(cluster.app) as server:
            url = str(server.make_url(""))
            made = Kubernetes(pool=POOL, namespace="rl", api_url=url, account=tmp_path, max_life_s=120)
            yield made
            await made.close()
        assert cluster.claims == {}
        assert {spec["lifecycle"]["shutdownPolicy"] for spec in cluster.made} == {"Delete"}
        await cluster.close()
    else:
        provider = FakeE2B()
        async with serving(provider.app) as url:
            made = E2B(api_key=KEY, api_url=url, sandbox_url=url, max_life_s=120)
            yield made
            await made.close()
        assert provider.open == {}
        assert {(body["timeout"], body["allow_internet_access"]) for body in provider.made} == {(120, False)}
        await provider.close()


async def said(sandbox: Sandbox, command: str) -> str:
    ran = await sandbox.exec(command)
    assert ran.stopped is None
    return ran.output.decode() + (f"[{ran.status}]" if ran.status else "")


def running(number: str) -> str:
    """Return a command that counts the running sleeps of a given duration."""
    return f"cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' ' | grep -c '[s]leep {number} '"


def processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the sandbox's user can access."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


# The contract


async def test_commands_share_a_session(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create(limits=LIMITS)
    assert await said(
        sandbox, "pwd; mkdir -p a/b; cd a/b; export X='1 \"2'; sleep 62 & echo out; echo err >&2"
    ) == ("/task\nout\nerr\n")
    assert await said(sandbox, 'pwd; echo "$X"; ' + running("62") + "; exit 7") == ('/task/a/b\n1 "2\n1\n[7]')
    assert await said(sandbox, "if then") != ""
    assert await said(sandbox, "pwd; kill -9 $$") == "/task/a/b\n[137]"


async def test_files_go_in_and_out(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create(limits=LIMITS)
    data = os.urandom(1 << 20)
    await sandbox.write("some file", data)
    assert await sandbox.read("/task/some file") == data
    await sandbox.put_tar(tar_of({"sub/a.txt": b"one", "-n": b"dash"}))
    assert await said(sandbox, "cat sub/a.txt; rm 'some file'") == "one"
    with pytest.raises(ToolError, match="No such file"):
        await sandbox.read("nothing")
    with pytest.raises(ToolError):
        await sandbox.write("no/folder", b"")
    with pytest.raises(ToolError, match="tar file is larger than 1 KiB"):
        await sandbox.get_tar(1024)
    other = await sandboxes.create(limits=LIMITS)
    await other.put_tar(await sandbox.get_tar())
    assert await other.read("-n") == b"dash"


async def test_a_fork_has_the_files_and_nothing_that_runs(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("given")
    sandbox = await sandboxes.create(SandboxSource(folder=tmp_path), LIMITS)
    await said(sandbox, "export PATH=/task:$PATH X=1; echo 1 > g.txt; sleep 61 &")
    kept = await sandbox.snapshot()
    fork = await sandbox.fork()
    await said(sandbox, "echo 2 > g.txt")
    assert await said(fork, "cat f.txt g.txt; echo ${X-unset}; " + running("61")) == "given1\nunset\n0\n[1]"
    await sandbox.close()
    await sandbox.close()
    again = await sandboxes.create(SandboxSource(snapshot=kept), LIMITS)
    assert await again.read("g.txt") == b"1\n"
    with pytest.raises(InvalidRequest, match="unknown snapshot"):
        await sandboxes.create(SandboxSource(snapshot="x"))


async def test_a_command_ends_at_its_limits(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create(limits=LIMITS)
    await said(sandbox, "echo kept > file")
    quick = SandboxLimits(run_s=1.0, max_output_bytes=1000)
    ran = await sandbox.exec("echo begun; sleep 60", quick)
    assert (ran.status, ran.stopped, ran.output[:5]) == (137, "it ran longer than 1 s", b"begun"[: len(ran.output)])
    ran = await sandbox.exec("head -c 5000 /dev/zero | tr '\\0' x", replace(quick, run_s=60.0))
    assert (ran.output, ran.num_cut_bytes) == (b"x" * 1000, 4000), ran
    call_it = asyncio.create_task(sandbox.exec("sleep 4322"))
    await asyncio.sleep(0.5)
    call_it.cancel()
    await asyncio.gather(call_it, return_exceptions=True)
    assert await said(sandbox, "cat file; " + running("4322")) == "kept\n0\n[1]"


async def test_there_is_no_network(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create(limits=LIMITS)
    assert await said(sandbox, "tail -n +3 /proc/net/dev | grep -vc ' lo:'") == "0\n[1]"
    with pytest.raises((InvalidRequest, ToolLost), match="network"):
        await sandboxes.create(SandboxSource(network="of-nobody"))


async def test_a_sandbox_that_is_gone_is_lost(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create(limits=LIMITS)
    await sandbox.close()
    with pytest.raises(ToolLost):
        await sandbox.exec("true")


# Images


def oci_layout(folder: Path) -> str:
    """Return a busybox image with a variable, in the layout of a registry, and its reference."""
    root = podman_service.rootfs(folder / "root")
    blobs = folder / "oci" / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    with tarfile.open(folder / "layer.tar", "w") as archive:
        archive.add(root, arcname=".")
    layer = blob((folder / "layer.tar").read_bytes())
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "OF_IMAGE=it's set"], "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    config = blob(json.dumps(settings).encode())
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", **config},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar", **layer}],
    }
    entry = {"mediaType": f"{kind}.manifest.v1+json", **blob(json.dumps(manifest).encode())}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (folder / "oci" / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return f"oci:{folder / 'oci'}:latest"


@isolates
async def test_a_task_brings_its_software(open_folder: Path) -> None:
    if shutil.which("busybox") is None:
        pytest.skip("needs busybox (apt: busybox-static)")
    root = podman_service.rootfs(open_folder / "rootfs")
    tool = ShellTool(images=[str(root)])
    session = tool.open_session("t", 0)
    await session.open(task(tool_setup={"shell": {"image": str(root), "files": {"a": "b"}, "command": "cp a c"}}))
    assert await session.call({"command": "ls / | tr '\\n' ' '; cat c; busybox | head -n 1 | cut -c 1-7"}) == (
        "bin dev proc task tmp bBusyBox"
    )
    assert "not found" in await session.call({"command": "python3"})
    assert "Read-only" in await session.call({"command": "touch /bin/x"})
    await session.close()
    for image in ("/", f"{root}/..", "docker://alpine"):
        with pytest.raises(InvalidRequest, match="is not allowed: it matches none of"):
            await tool.open_session("t", 0).open(task(tool_setup={"shell": {"image": image}}))
    with pytest.raises(InvalidRequest, match="no such thing"):
        await tool.open_session("t", 0).open(task(tool_setup={"shell": {"command": "echo no such thing; false"}}))
    await tool.close()


@isolates
async def test_an_image_of_a_registry_is_unpacked_once(open_folder: Path) -> None:
    for program in ("skopeo", "umoci", "busybox"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (apt: skopeo umoci busybox-static)")
    source = SandboxSource(image=oci_layout(open_folder))
    kept = open_folder / "images"
    for _ in range(2):
        sandboxes = Bubblewrap(images=kept)
        one, other = await asyncio.gather(sandboxes.create(source), sandboxes.create(source))
        assert (
            await said(one, "echo $OF_IMAGE $HOME; busybox | head -n 1 | cut -c 1-7") == "it's set /task\nBusyBox\n"
        )
        assert await said(other, "which python3") == "[1]"
        await sandboxes.close()
        assert len(list(kept.iterdir())) == 1
    sandboxes = Bubblewrap(images=kept)
    with pytest.raises(ToolLost, match="skopeo inspect"):
        await sandboxes.create(SandboxSource(image="oci:/nowhere:latest"))
    await sandboxes.close()


# Lifecycle


@isolates
async def test_warm_sandboxes_are_used_once_each() -> None:
    made = CountingSandboxes()
    sandboxes = WarmSandboxes(made, num_warm=3)
    first = await sandboxes.create()
    while made.num_made < 4:
        await asyncio.sleep(0.01)
    others = [await sandboxes.create() for _ in range(3)]
    await others[0].exec("echo 1 > file; export X=1")
    assert await said(others[1], "ls; echo ${X-unset}") == "unset\n"
    assert len({id(one) for one in (first, *others)}) == 4
    special = await sandboxes.create(limits=LIMITS)
    assert special not in (first, *others)
    await sandboxes.close()
    made.hangs = True
    with pytest.raises(ToolLost, match=r"the sandbox did not start within 0\.05 s"):
        await WarmSandboxes(made, num_warm=0, create_s=0.05).create()


class CountingSandboxes(Bubblewrap):
    num_made = 0
    hangs = False

    async def make(self, source, limits):
        if self.hangs:
            await asyncio.Event().wait()
        made = await super().make(source, limits)
        self.num_made += 1
        return made


@isolates
async def test_a_folder_of_the_host_is_seen_and_a_second_close_closes_nothing_of_another() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as corpus:
        os.chmod(corpus, 0o755)
        os.mkdir(f"{corpus}/seen")
        sandboxes = Bubblewrap(read_only=[corpus])
        ran = await (await sandboxes.create()).exec(f"ls {corpus} && touch {corpus}/new")
        assert (ran.status, ran.output[:5], os.listdir(corpus)) == (1, b"seen\n", ["seen"])
        await sandboxes.close()
        others = [os.open(corpus, os.O_RDONLY) for _ in range(32)]  # one of them takes the freed descriptor number
        await sandboxes.close()
        for other in others:
            os.close(other)


@isolates
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    sandboxes = Bubblewrap()
    for step in range(60):
        starting = asyncio.create_task(sandboxes.create())
        await asyncio.sleep(0.0003 * step)  # a start takes 10 ms
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    await sandboxes.close()
    assert f"/{os.getpid()}-" not in processes()


@isolates
async def test_a_lost_sandbox_is_no_fault_of_the_policy() -> None:
    class Losing(Bubblewrap):
        async def make(self, source, limits):
            sandbox = await super().make(source, limits)
            await sandbox.kill()
            [folder] = glob.glob(f"{tempfile.gettempdir()}/agentloop-sandboxes-*/{os.getpid()}-*/task-*")
            os.rmdir(folder)
            return sandbox

    feeder = FakeCoordinator([task(tools=("shell",), reward=f"{__name__}:never")])
    engines = {"sim://a": scripted_engine(call("shell", command="true"), "Done.")}
    async with running_worker(feeder, engines, tools=[ShellTool(sandboxes=Losing())]), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    assert (record.stop_reason, record.reward, record.reward_error) == (StopReason.TOOL_FAILED, None, None)
    assert "Can't find source path" in (record.error or "")


async def never(task, messages) -> float:
    return 1.0


@isolates
def test_a_killed_worker_leaves_nothing() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert worker.stdout is not None
    base, *pids = worker.stdout.readline().split()
    assert Path(base).exists()
    assert len(pids) >= 4 * 4, "three that wait, a shell, and a sleep"
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    asyncio.run(Bubblewrap().close())  # the next instance removes leftovers
    assert not Path(base).exists()
    assert base not in Path("/proc/mounts").read_text()


WORKER = """
    import asyncio, os
    from pathlib import Path
    from agentloop_tools.sandbox.bubblewrap import Bubblewrap

    def below(pid):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield child
            yield from below(child)

    async def main():
        sandboxes = Bubblewrap()
        made = [await sandboxes.create() for _ in range(4)]
        await asyncio.gather(*(one.exec("setsid sleep 4323 & sleep 4323 & echo > file") for one in made))
        running = [asyncio.create_task(one.exec("sleep 4323")) for one in made]
        await asyncio.sleep(0.5)
        print(sandboxes._base, *below(os.getpid()), flush=True)
        await asyncio.gather(*running)

    asyncio.run(main())
"""


@isolates
async def test_a_claim_that_is_not_ready_or_gone_is_a_lost_sandbox(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    async with TestServer(cluster.app) as server:
        url = str(server.make_url(""))
        made = Kubernetes(pool=POOL, namespace="rl", api_url=url, account=tmp_path, ready_s=0.5)
        with pytest.raises(ToolLost, match=r"was not ready within 0\.5 s: WarmPoolNotFound no warm pool other"):
            await made.create(SandboxSource(image="other"))
        assert cluster.claims == {}
        with pytest.raises(InvalidRequest, match="the template of the pool"):
            await made.create(SandboxSource(network="internet"))
        sandbox = await made.create()
        await cluster.claims.pop("agentloop-2").close()
        with pytest.raises(ToolLost, match="the cluster does not respond"):
            await sandbox.exec("echo on")
        (tmp_path / "token").write_text("of-nobody")
        with pytest.raises(ToolLost, match="the cluster returned status 401"):
            await made.create()
        await made.close()
    await cluster.close()


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([(502, "<html>bad gateway</html>", {})], "returned status 502: <html>"),
        ([(401, '{"message": "no key"}', {})], "returned status 401"),
        ([(200, "<html>log in</html>", {})], "not JSON: <html>"),
        ([(200, '{"moved": true}', {})], "violates its protocol: KeyError"),
        ([(200, "[]", {})], "violates its protocol: TypeError"),
        ([(200, "", {})], "violates its protocol: TypeError"),
        ([(503, "", {})], "returned status 503"),
        ([(429, "busy", {"Retry-After": "0"})] * 3, "returned status 429: busy"),
        ([(429, "busy", {"Retry-After": "3600"})], "returned status 429: busy"),
        (
            [(429, "busy", {"Retry-After": "0"}), (503, "", {"Retry-After": "0"}), (400, "bad template", {})],
            "returned status 400",
        ),
    ],
)
async def test_a_failure_of_the_service_is_never_text(
    answers: list[tuple[int, str, dict[str, str]]], says: str
) -> None:
    left = list(answers)

    async def create(request: web.Request) -> web.Response:
        status, text, headers = left.pop(0)
        return web.Response(status=status, text=text, headers=headers)

    app = web.Application()
    app.router.add_post("/sandboxes", create)
    async with TestServer(app) as server:
        maker = E2B(api_key="k", api_url=str(server.make_url("/")))
        with pytest.raises(ToolLost, match=says):
            await maker.create()
        assert left == []  # a refused call was repeated; calls that were not refused were not
        await maker.close()
