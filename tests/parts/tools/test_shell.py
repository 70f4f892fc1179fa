"""The shell tool: capabilities of a command, enforced limits, and the error on a host without bubblewrap."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
import subprocess
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import RolloutTask
from agentloop_tools.sandbox import SandboxLimits
from agentloop_tools.sandbox.bubblewrap import TreeUse, refusal, tree_use
from agentloop_tools.shell import MAX_STATE_BYTES, ShellSession, ShellTool
from tests.support.engine.scripted import call
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine, Relay, files
from tests.support.fleet.worker import running_worker, task

WHY_NOT = refusal()
isolates = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
LIMITS = SandboxLimits(
    run_s=20.0, max_memory_bytes=256 << 20, max_processes=24, max_folder_bytes=8 << 20, max_files=200
)


def shell_task(**fields: object) -> RolloutTask:
    return task(**{"tools": ("shell",), "reward": f"{__name__}:answer_in_the_folder", **fields})


@asynccontextmanager
async def opened(limits: SandboxLimits = LIMITS, **setup: str):
    """Open a session with files."""
    tool = ShellTool(limits=limits)
    session = tool.open_session("t", 0)
    try:
        await session.open(shell_task(tool_setup={"shell": {"files": setup}}))
        yield session
    finally:
        await session.close()
        await tool.close()


async def said(session: ShellSession, command: str) -> str:
    return await session.call({"command": command})


async def answer_in_the_folder(task, messages, tools) -> float:
    return float((await tools["shell"].sandbox.read("answer.txt")).strip() == b"5")


# Hosts without bubblewrap


def fake_programs(folder: Path, bwrap: str) -> str:
    """Set a PATH on which `bwrap` is a script, next to the other programs that are needed."""
    for name, text in {"bwrap": bwrap, "nsenter": "exit 0", "tar": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    folder.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("bwrap", "says"),
    [
        (None, "bwrap is not installed (package bubblewrap)"),
        ("echo bubblewrap 0.5.0", "bubblewrap 0.5.0 is too old: at least 0.8 is required"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.11.0 && exit; echo "bwrap: No permissions to create new '
            'namespace" >&2; exit 1',
            "bwrap cannot isolate commands on this host: bwrap: No permissions to create new namespace",
        ),
    ],
)
def test_a_host_that_cannot_isolate_is_refused_and_told_why(bwrap, says: str, monkeypatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("PATH", folder if bwrap is None else fake_programs(Path(folder), bwrap) + ":/usr/bin")
        assert refusal() == says
        with pytest.raises(InvalidRequest) as refused:
            ShellTool()
    assert refused.value.message == f"no sandbox can run on this host: {says}"
    assert refused.value.param == "tools"


# Commands


@isolates
async def test_commands_share_a_session() -> None:
    async with opened(**{"a.txt": "one\n", "sub/b.txt": "two\n"}) as session:
        assert await said(session, "cat a.txt sub/b.txt; pwd") == "one\ntwo\n/task"
        assert await said(session, "echo three > c.txt; export X='1 2'; cd sub; sleep 4331 & echo begun") == "begun"
        assert await said(session, "cat ../c.txt b.txt; echo $X; pwd") == "three\ntwo\n1 2\n/task/sub"
        assert await said(session, "pgrep -fc 'sleep [4]331'; kill %1 2> /dev/null; pkill -f '[4]331'") == "1"
        assert await said(session, "(exit 4); cd /task; Y=lost; rm -r sub; false") == "[exit status 1]"
        assert await said(session, "echo ${Y-unset}; echo out; echo err >&2; exit 3") == (
            "unset\nout\nerr\n[exit status 3]"
        )
        assert await said(session, "cat nothing") == "cat: nothing: No such file or directory\n[exit status 1]"
        assert "syntax error" in await said(session, "if then")
        # Concurrent commands run in the order in which they were started.
        await asyncio.gather(*(said(session, f"sleep 0.0{9 - n}; echo {n} >> order") for n in range(4)))
        assert await said(session, "tr -d '\\n' < order") == "0123"


@isolates
async def test_a_background_server_is_reached_by_the_next_command() -> None:
    serve = "python3 -m http.server 8000 --bind 127.0.0.1 & "
    ask = "for n in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/8000 && break; sleep 0.1; done 2> /dev/null"
    async with opened(**{"page": "content\n"}) as session:
        assert await said(session, serve) == ""
        got = await said(session, f"{ask}; printf 'GET /page HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3")
        assert got.endswith("content")
        assert "content" in await said(session, f"{ask}; printf 'GET /page HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3")


@isolates
async def test_a_session_begins_anew_after_its_processes_were_killed() -> None:
    async with opened() as session:
        await said(session, "export X=1; echo kept > file; sleep 4331 &")
        stopped = (await session.sandbox.exec("sleep 60", replace(LIMITS, run_s=1.0))).stopped
        assert stopped == "it ran longer than 1 s"
        assert await said(session, "cat file; echo ${X-unset}; pgrep -c sleep") == "kept\nunset\n0\n[exit status 1]"
        assert await said(session, "kill -9 -1; sleep 1") == "[exit status 137]"
        assert await said(session, "kill -9 2; sleep 1") == "[exit status 137]", "the shell that waits"
        assert await said(session, "cat file") == "kept"


@isolates
async def test_background_processes_leave_room_for_a_command() -> None:
    async with opened() as session:
        await said(session, "for n in $(seq 18); do sleep 60 & done")
        assert await said(session, "pgrep -c sleep; echo on") == "0\non"


@isolates
async def test_nothing_of_the_host_is_reachable(monkeypatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", "secret-of-the-host")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with opened() as session:
        assert "secret" not in await said(session, "env; cat /proc/*/environ | tr '\\0' '\\n'")
        for path in ("/etc/passwd", "/etc/shadow", "/root", "/home", "/var", "/work", str(Path(__file__))):
            assert "No such file" in await said(session, f"ls {path}")
        for path in ("/usr/x", "/x", "/dev/x", "/etc/x", "/proc/sys/kernel/hostname"):
            assert await said(session, f"echo 1 > {path} && echo written") != "written"
        assert "written" not in await said(session, f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo written")
        assert int(await said(session, "ls /proc | grep -c '^[0-9]'")) < 10, "its own processes only"
        assert "nested" not in await said(session, "unshare -Ur echo nested")
        assert (await said(session, "grep CapEff /proc/self/status")).split()[1] == "0" * 16
        # A link that the policy creates resolves inside the sandbox for every reader of the session.
        await said(session, "ln -s /etc/shadow answer.txt")
        with pytest.raises(ToolError, match="No such file"):
            await session.sandbox.read("answer.txt")
    server.close()


@isolates
async def test_limits_hold() -> None:
    async with opened() as session:
        memory = "python3 -c 'x = bytearray(400 << 20)' 2>&1 | tail -1; [ ${PIPESTATUS[0]} = 0 ] && echo had it"
        assert "had it" not in await said(session, memory)
        forked = await said(session, "for n in $(seq 100); do sleep 5 & done; echo all")
        assert "Resource temporarily unavailable" in forked
        with pytest.raises(ToolError, match="more than 8 MiB"):
            await said(session, "n=0; while true; do n=$((n+1)); head -c 4000000 /dev/zero > $n; done")
        assert await said(session, "echo more > more") == "[exit status 153]", "SIGXFSZ: it is full"
        assert await said(session, "rm -f *; ls") == ""
        assert await said(session, "echo more > more; cat more; rm more") == "more"
        with pytest.raises(ToolError, match="more than 200 files"):
            await said(session, "n=0; while true; do n=$((n+1)); : > $n; done")
        await said(session, "rm -f *")
        assert "written" not in await said(session, "head -c 100M /dev/zero > /tmp/x && echo written; rm /tmp/x")
    async with opened(SandboxLimits(run_s=1.0)) as session:
        with pytest.raises(ToolError, match=r"killed: it ran longer than 1 s(\nbegun)?$"):
            await said(session, "echo begun; sleep 60")
    async with opened(replace(LIMITS, max_output_bytes=1000)) as session:
        printed = await said(session, "head -c 5000 /dev/zero | tr '\\0' x")
        assert printed == "x" * 1000 + "\n...[4000 bytes more]"


@isolates
async def test_memory_of_all_processes_together_is_bounded() -> None:
    each = "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(30)'"
    async with opened(SandboxLimits(run_s=40.0, max_memory_bytes=150 << 20)) as session:
        with pytest.raises(ToolError, match="its processes used more than 150 MiB"):
            await said(session, " & ".join([each] * 4) + " & wait")


@isolates
async def test_a_cancelled_command_leaves_no_process() -> None:
    async with opened() as session:
        running = asyncio.create_task(said(session, "sleep 4321 & sleep 4321"))
        while "sleep 4321" not in (table := processes()):
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(20):
            while "sleep 4321" in (table := processes()):
                await asyncio.sleep(0.02)
        assert table
        assert await said(session, "echo on") == "on"


def processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


# Lifecycle


@isolates
@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "x" * 600, "a\0b"])
async def test_files_outside_the_folder_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a relative path within"):
        async with opened(**{path: "x"}):
            pass


@isolates
async def test_a_folder_goes_with_its_trajectory_whatever_is_in_it() -> None:
    async with opened() as session:
        await said(session, "mkdir -p $(printf 'd/%.0s' $(seq 60)); mkdir shut; : > shut/x; chmod 0 shut")
        base = next(
            iter((Path(tempfile.gettempdir()) / f"agentloop-sandboxes-{os.geteuid()}").glob(f"{os.getpid()}-*"))
        )
        assert len(list(base.iterdir())) == 1
        await session.close()
        assert list(base.iterdir()) == []
    assert not base.exists()


@isolates
def test_folders_of_processes_that_died_are_removed_by_the_next_tool() -> None:
    root = Path(tempfile.gettempdir()) / f"agentloop-sandboxes-{os.geteuid()}"
    asyncio.run(ShellTool().close())
    (dead := Path(tempfile.mkdtemp(dir=root))).joinpath("left").touch()
    alive = Path(tempfile.mkdtemp(dir=root))
    held = os.open(alive, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    asyncio.run(ShellTool().close())
    assert (dead.exists(), alive.exists()) == (False, True)
    os.close(held)
    asyncio.run(ShellTool().close())
    assert not alive.exists()


@isolates
async def test_a_folder_can_be_carried_to_another_session() -> None:
    async with opened(**{"a.txt": "one"}) as first:
        await said(first, "echo two > b.txt; chmod 700 b.txt; ln -s b.txt link; rm a.txt")
        state = await first.snapshot()
        await said(first, f"head -c {2 * MAX_STATE_BYTES} /dev/zero > big")
        with pytest.raises(ToolError, match="tar file is larger than 1024 KiB"):
            await first.snapshot()
    async with opened(**{"a.txt": "one"}) as second:
        await second.restore(state)
        assert await said(second, "ls; cat link; stat -c %a b.txt") == "b.txt\nlink\ntwo\n700"
        with pytest.raises(ToolError, match="not look like a tar"):
            await second.restore(b"no tar")


@isolates
async def test_a_reward_sees_the_folder_and_a_lost_worker_costs_no_file(tmp_path: Path) -> None:
    replies = [
        call("shell", command="cat question.txt > seen"),
        call("shell", command="echo $((2+3)) > answer.txt; cat seen"),
        "Done.",
    ]
    given = shell_task(tool_setup={"shell": {"files": {"question.txt": "2+3"}}})
    feeder, engine = Relay([given]), HangingEngine(*replies, hangs_at=1)
    tool, journal = ShellTool(), TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    async with running_worker(feeder, {"sim://a": engine}, journal=journal, tools=[tool]), asyncio.timeout(60):
        await engine.is_hanging.wait()
        while not files(tmp_path):
            await asyncio.sleep(0.01)
    await journal.close()
    feeder.lose_worker()
    tool, journal = ShellTool(), TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    engines = {"sim://a": HangingEngine(*replies)}
    async with running_worker(feeder, engines, journal=journal, tools=[tool]), asyncio.timeout(60):
        await feeder.is_done.wait()
    await journal.close()
    record = feeder.records["t/0"]
    assert (record.num_resumed_turns, record.reward, record.reward_error) == (1, 1.0, None)
    assert [message.content for message in record.messages if message.role == "tool"] == ["", "2+3"]


@isolates
async def test_a_task_with_files_that_cannot_be_there_is_invalid() -> None:
    feeder = FakeCoordinator([shell_task(tool_setup={"shell": {"file": {}}})])
    engines = {"sim://a": HangingEngine("Done.")}
    async with running_worker(feeder, engines, tools=[ShellTool()]), asyncio.timeout(60):
        await feeder.is_done.wait()
    problem = "tool 'shell': tool_setup.shell.file: Extra inputs are not permitted"
    assert feeder.records["t/0"].error == f"invalid_request: {problem}"


@isolates
async def test_a_chain_of_short_processes_ends_with_its_cpu_time() -> None:
    """Each process stays below the kernel's limit, and the command that started the chain has ended."""
    limits = replace(LIMITS, run_s=0.5)
    async with opened(limits) as session:
        await session.sandbox.exec("true", LIMITS)
        num_threads = tree_use(os.getpid()).num_threads
        await session.sandbox.exec("f() { for n in $(seq 2000); do :; done; f & }; f >/dev/null 2>&1 &")
        async with asyncio.timeout(60):
            # the process is killed with the sandbox's own processes
            while tree_use(os.getpid()).num_threads >= num_threads:
                await asyncio.sleep(0.02)
        assert (await session.sandbox.exec("echo on", LIMITS)).output == b"on\n"


def test_use_is_that_of_the_whole_tree() -> None:
    sleeper = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"], start_new_session=True)
    try:
        while tree_use(sleeper.pid).num_threads < 3:
            time.sleep(0.01)
        assert tree_use(os.getpid()).num_bytes > tree_use(sleeper.pid).num_bytes > 0
        assert 0 < tree_use(os.getpid()).cpu_s <= tree_use(os.getpid(), sleeper.pid).cpu_s
    finally:
        os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.wait()
    assert tree_use(sleeper.pid) == TreeUse()


def test_deleted_files_that_are_open_or_mapped_are_counted() -> None:
    with tempfile.TemporaryFile() as opened_file, tempfile.TemporaryFile() as mapped_file:
        for file in (opened_file, mapped_file):
            file.write(bytes(1 << 20))
            file.flush()
        key = os.fstat(mapped_file.fileno()).st_dev, os.fstat(mapped_file.fileno()).st_ino
        with mmap.mmap(mapped_file.fileno(), 1 << 20) as mapping:
            mapped_file.close()
            use = tree_use(os.getpid())
            assert use.deleted[key] >= 1 << 20
            assert use.num_deleted_bytes(key[0]) >= 2 << 20
            assert len(mapping) == 1 << 20


def test_two_shells_have_two_names() -> None:
    if WHY_NOT is None:
        toolbox = Toolbox([ShellTool(), ShellTool(name="bash")])
        assert [one["function"]["name"] for one in toolbox.definitions(["bash", "shell"])] == ["bash", "shell"]


CHEATS = {
    "usercustomize": "mkdir -p .local/lib/python3.11/site-packages && "
    "echo 'import os; os._exit(0)' > .local/lib/python3.11/site-packages/usercustomize.py",
    "conftest": "echo 'import os; os._exit(0)' | tee conftest.py sitecustomize.py > usercustomize.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' | tee pytest.ini tox.ini > setup.cfg",
    "shadow modules": "echo 'import os; os._exit(0)' | tee json.py unittest.py re.py pytest.py > random.py",
    "exit in the code": "printf 'import os\\nos._exit(0)\\n' > add.py",
    "exit at the end": "printf 'import atexit, os\\natexit.register(os._exit, 0)\\nadd = max\\n' > add.py",
    "a variable": "export PYTHONSTARTUP=/task/add.py PYTHONPATH=/task BASH_ENV=/task/go; echo 'exit 0' > go",
    "a profile": "echo 'exit 0' | tee .bashrc .profile .bash_profile > .bash_login",
}
HIDDEN = "import json, random, unittest\nfrom add import add\nassert add(2, 3) == 5\nprint('AGENTLOOP_VERDICT')\n"


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_planted_file_or_exit_passes_no_hidden_test(cheat: str) -> None:
    async with opened(**{"add.py": "def add(a, b):\n    return a - b\n"}) as session:
        assert not (await session.sandbox.exec(CHEATS[cheat])).status
        graded = await session.grade("python3 test_add.py", {"test_add.py": HIDDEN})
        assert not graded.has_passed, graded.output
        module = await session.grade("python3 -m unittest -q test_add", {"test_add.py": HIDDEN})
        assert not module.has_passed, module.output


async def test_right_code_passes_a_hidden_test_whatever_lies_beside_it() -> None:
    async with opened(**{"add.py": "def add(a, b):\n    return a + b\n"}) as session:
        for name in ("usercustomize", "conftest", "pytest.ini", "shadow modules", "a variable", "a profile"):
            await session.sandbox.exec(CHEATS[name])
        assert (await session.grade("python3 test_add.py", {"test_add.py": HIDDEN})).has_passed
        assert (await session.grade("sh -c 'echo $HOME && echo AGENTLOOP_VERDICT'")).has_passed
        assert not (await session.grade("true")).has_passed
