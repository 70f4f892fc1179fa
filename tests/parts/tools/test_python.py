"""The `python` tool: answers, state, limits, and isolation from the host."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from agentloop import parts
from agentloop.errors import ToolError
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.types import ToolCall
from agentloop_tools.python import MAX_SOURCE_BYTES, PythonSession, PythonTool, with_value_printed
from tests.rollout.test_turn_journal import ANSWER, at_work, written
from tests.support.engine.scripted import call
from tests.support.fleet.lost_worker import HangingEngine, Relay
from tests.support.fleet.worker import task

TOO_MUCH = "MemoryError: more than 32 MiB of memory or 256 KiB of output"
TOO_LONG = "TimeoutError: ran longer than 0.5 s"
MAX_TEST_S = 200.0  # for work that takes a second on idle cores


@pytest.fixture(scope="module")
async def python() -> AsyncIterator[PythonTool]:
    tool = PythonTool(num_workers=2, max_run_s=0.5)
    yield tool
    await tool.close()


@pytest.fixture(scope="module")
async def patient() -> AsyncIterator[PythonTool]:
    """A Python tool whose time limit is never reached before the others, even on busy cores."""
    tool = PythonTool(num_workers=1, max_run_s=MAX_TEST_S)
    yield tool
    await tool.close()


@pytest.fixture
def session(python: PythonTool) -> PythonSession:
    return python.open_session("t", 7)


async def error_of(session: PythonSession, code: str) -> str:
    with pytest.raises(ToolError) as caught:
        await session.call({"code": code})
    message = caught.value.message
    assert "\n" not in message
    assert len(message) <= 310
    return message


def test_the_definition_is_exact() -> None:
    assert PythonTool().spec.definition() == {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python code and return what it prints, or else the value of its last expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "Python source. No files, no network, few modules."}
                },
                "required": ["code"],
                "additionalProperties": False,
            },
        },
    }


def test_every_shipped_tool_loads_under_its_name() -> None:
    registered = parts.registered(parts.DEFAULT_TOOLS)
    assert [tool.spec.name for tool in load_tools(list(registered), registered)] == list(registered)


# Answers


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 + 1", "2"),
        ("'a'", "'a'"),
        ("print('hi')", "hi"),
        ("print('hi')\n3", "hi"),
        ("print('a\\n')", "a\n"),
        ("print('a', end='')", "a"),
        ("import sys\nprint('e', file=sys.stderr)", "e"),
        ("x = 3; x * 2", "6"),
        ("x = 3; x * 2;  # six", "6"),
        ("x = 3", ""),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("for i in range(2): i", ""),
        ("if True: 5", ""),
        ("(1 +\n 2)", "3"),
        ("(\n1,\n2)", "(1, 2)"),
        ("1, 2", "(1, 2)"),
        ("'\u00fc\u00e9'; 'z' + \\\n 'y'", "'zy'"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000"),
        ("import re\nre.findall('\\d+', 'a1b22')", "['1', '22']"),
        ("class P:\n  def __repr__(self):\n    return 'P!'\n[P()]", "[P!]"),
        ("repr = str\n'a'", "'a'"),
        ("a = 1\r\na", "1"),
        ("import asyncio\nasync def g():\n    await asyncio.sleep(9)\n    return 4\nawait g()", "4"),
        ("x = []\nx.append(x)\nx", "[[...]]"),
        ("print('\\x00\\x1b[31m<|im_end|>')", "\x00\x1b[31m<|im_end|>"),
        ("'a\\ud800'", "'a\ufffd'"),
    ],
)
async def test_answers(session: PythonSession, code: str, answer: str) -> None:
    assert await session.call({"code": code}) == answer


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('lost')\nfoo", "NameError: name 'foo' is not defined"),
        ("foo(1)", "NameError: name 'foo' is not defined"),
        ("raise ValueError('a\\nb')", "ValueError: a b"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
        ("assert 1 == 2", "AssertionError: assert 1 == 2"),
        ("def f(:", "SyntaxError: Expected a parameter or the end of the parameter list"),
        ("10 ** 5000", "ValueError: Exceeds the limit (4300 digits) for integer string conversion"),
        ("'\ud800'", "SyntaxError: source code is not valid UTF-8"),
        ("raise ValueError('x' * 100000)", "ValueError: xxx"),
        ("(" * 5000, "SyntaxError: "),
        ("def g():\n    yield 1", "NotImplementedError: "),
    ],
)
async def test_exceptions_are_one_short_line(session: PythonSession, code: str, error: str) -> None:
    assert (await error_of(session, code)).startswith(error)


async def test_arguments_are_validated(session: PythonSession) -> None:
    for arguments, text in (
        ({}, "code: Field required"),
        ({"code": 3}, "valid string"),
        ({"code": "", "x": 1}, "x: Extra"),
    ):
        with pytest.raises(ToolError, match=text):
            await session.call(arguments)
    assert await error_of(session, "#" * (MAX_SOURCE_BYTES + 1)) == f"code longer than {MAX_SOURCE_BYTES} bytes"


def test_code_that_computes_no_value_is_left_as_it_is() -> None:
    for code in ("x = 1", "def f(:", "", "-" * 16_000 + "1", "(" * 300):
        assert with_value_printed(code, "M") == code


# State


async def test_variables_live_from_call_to_call_in_one_trajectory_only(python: PythonTool) -> None:
    one, other = python.open_session("a", 1), python.open_session("b", 1)
    await one.call({"code": "import math\nx = 41\ndef f(n):\n    return n + x\nclass A:\n    z = 3\na = A()"})
    assert await one.call({"code": "f(1), a.z, math.floor(2.5)"}) == "(42, 3, 2)"
    assert await error_of(other, "x") == "NameError: name 'x' is not defined"


async def test_what_code_binds_to_print_is_its_own(session: PythonSession) -> None:
    await session.call({"code": "x = 40\nprint = 5"})
    assert await session.call({"code": "x + 2"}) == "42"
    assert await session.call({"code": "print"}) == "5"
    with pytest.raises(ToolError, match="not callable"):
        await session.call({"code": "print(x)"})
    assert await session.call({"code": "x"}) == "40"


async def test_code_that_ends_itself_is_answered_with_what_it_printed(session: PythonSession) -> None:
    assert await session.call({"code": "x = 1\nprint('done')\nraise SystemExit"}) == "done"
    assert await session.call({"code": "x"}) == "1"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("raise SystemExit", ""),
        ("print('done')\nraise SystemExit(0)", "done"),
        ("raise SystemExit(None)", ""),
        ("print('half')\nraise SystemExit(3)", "half\n[exit status 3]"),
        ("def f(n):\n    raise SystemExit(  # ♜\n        n * 2)\n'é'; f(21)", "[exit status 42]"),
        ("raise SystemExit('no such\\nfile')", "no such file\n[exit status 1]"),
        ("try:\n    raise SystemExit(2)\nexcept SystemExit as end:\n    print('caught', end)", "caught 2"),
    ],
)
async def test_code_that_exits_ends_its_call_as_python_would(
    session: PythonSession, code: str, answer: str
) -> None:
    await session.call({"code": "kept = 1"})
    assert await session.call({"code": code}) == answer
    assert await session.call({"code": "kept"}) == "1"


async def test_calls_of_one_turn_run_in_order(session: PythonSession) -> None:
    await session.call({"code": "x = []"})
    answers = await asyncio.gather(*(session.call({"code": f"x.append({n})\nx"}) for n in range(4)))
    assert answers == ["[0]", "[0, 1]", "[0, 1, 2]", "[0, 1, 2, 3]"]


async def test_what_an_exception_leaves_is_kept_and_what_an_overrun_leaves_is_not(session: PythonSession) -> None:
    await error_of(session, "x = 1\n1 / 0")
    assert await session.call({"code": "x"}) == "1"
    assert await error_of(session, "x = 2\nwhile True: pass") == TOO_LONG
    assert await session.call({"code": "x"}) == "1"


async def test_variables_are_bounded(session: PythonSession) -> None:
    await session.call({"code": "x = 1"})
    assert await error_of(session, "x = 'a' * (1 << 20)") == "MemoryError: variables of more than 1024 KiB"
    assert await session.call({"code": "x"}) == "1"


async def test_the_seed_and_a_still_clock_make_calls_reproducible(python: PythonTool) -> None:
    async def draws(seed: int) -> list[str]:
        session = python.open_session("t", seed)
        code = "import random, time\ntime.sleep(100)\nrandom.random(), time.time()"
        return [await session.call({"code": code}) for _ in range(2)]

    first, again, other = await draws(7), await draws(7), await draws(8)
    assert first == again
    assert first[0] != first[1]  # the generator continues and does not restart
    assert first != other


# Limits


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", TOO_LONG),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", TOO_LONG),
        ("sum(range(10 ** 9))", TOO_LONG),
        ("import math\nmath.factorial(10 ** 6)", TOO_LONG),
        ("class R:\n    def __repr__(self):\n        while True: pass\nR()", TOO_LONG),
        ("while True: print('x' * 1000)", TOO_MUCH),  # the size is checked when the command ends
    ],
)
async def test_code_that_does_not_end_is_stopped_and_the_next_call_works(
    session: PythonSession, code: str, error: str
) -> None:
    await session.call({"code": "kept = 1"})
    async with asyncio.timeout(MAX_TEST_S):
        assert await error_of(session, code) == error
    assert await session.call({"code": "kept + 1"}) == "2"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("10 ** 10 ** 8", TOO_MUCH),
        ("1 << 10 ** 9", TOO_MUCH),
        ("'a' * 10 ** 10", TOO_MUCH),
        ("x = [0]\nwhile True: x = x + x", TOO_MUCH),
        ("[0] * 10 ** 7", TOO_MUCH),
        ("'%s' % ('a' * 10 ** 9)", TOO_MUCH),
        ("print('x' * 10 ** 6)", TOO_MUCH),
        # Small values that expand without limit when they are converted or printed:
        ("x = 'a' * 10 ** 6\n[x] * 2000", TOO_MUCH),
        ("x = [1] * 10\nfor i in range(8): x = [x] * 10\nx", TOO_MUCH),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
async def test_runaway_code_is_stopped_and_the_next_call_works(patient: PythonTool, code: str, error: str) -> None:
    session = patient.open_session("t", 7)
    await session.call({"code": "kept = 1"})
    async with asyncio.timeout(MAX_TEST_S):
        assert await error_of(session, code) == error
    assert await session.call({"code": "kept + 1"}) == "2"


@pytest.mark.parametrize(
    "code",
    [
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        "import re\nre.match('(a|aa)+$', 'a' * 60 + 'b')",
        "import re\nre.sub('(.*)*x', '', 'a' * 40)",
    ],
)
async def test_a_regex_bomb_is_harmless(session: PythonSession, code: str) -> None:
    started_s = time.monotonic()
    try:
        await session.call({"code": code})
    except ToolError as error:
        assert error.message == TOO_LONG  # noqa: PT017 (either outcome will do)
    assert time.monotonic() - started_s < 30


async def test_sixteen_trajectories_share_two_workers_past_hostile_ones(python: PythonTool) -> None:
    toolbox = Toolbox([python])
    scopes = [toolbox.open(["python"], f"t{n}", n) for n in range(16)]
    codes = ["while True: pass" if n % 4 == 0 else f"{n} * 2" for n in range(16)]
    runs = (s.run([ToolCall("c", "python", {"code": c})], 1000) for s, c in zip(scopes, codes, strict=True))
    results = [result for [result] in await asyncio.gather(*runs)]
    for n, result in enumerate(results):
        assert result.content == (f"Error: {TOO_LONG}" if n % 4 == 0 else str(n * 2))
    await asyncio.gather(*(scope.close() for scope in scopes))


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def test_a_worker_that_dies_is_replaced() -> None:
    before = child_pids()
    tool = PythonTool(num_workers=1, max_run_s=20.0)
    session = tool.open_session("t", 0)
    await session.call({"code": "x = 1"})
    [worker] = child_pids() - before
    running = asyncio.create_task(session.call({"code": "while True: pass"}))
    await asyncio.sleep(0.2)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(ToolError, match="SystemError: worker died"):
        await asyncio.wait_for(running, 15)
    assert await session.call({"code": "x"}) == "1"
    await tool.close()
    await tool.close()
    assert child_pids() <= before
    with pytest.raises(ToolError, match="closed"):
        await session.call({"code": "1"})


def test_a_process_that_never_closes_the_tool_still_ends_cleanly() -> None:
    script = """
import asyncio
from agentloop_tools.python import PythonTool
from agentloop.errors import ToolError
async def main():
    session = PythonTool(num_workers=1, max_run_s=0.3).open_session("t", 0)
    try:
        await asyncio.wait_for(session.call({"code": "while True: pass"}), 0.1)
    except TimeoutError:
        print("cancelled")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\n", "")


# Isolation


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('/etc/shadow').read()",
        "open('/proc/self/environ').read()",
        "open('/proc/1/environ').read()",
        "open('out.txt', 'w').write('x')",
        "from pathlib import Path\nPath('/etc/passwd').read_text()",
        "from pathlib import Path\nPath('/tmp/x').write_text('x')",
        "from pathlib import Path\nlist(Path('/').iterdir())",
        "import os\nos.listdir('/')",
        "import os\nos.environ",
        "import os\nos.environ['PATH']",
        "import os\nos.getenv('PATH')",
        "import os\nos.system('id')",
        "import os\nos.fork()",
        "import os\nos.kill(1, 9)",
        "import os\nos.symlink('/etc', '/tmp/etc')",
        "import os\nos.popen('id')",
        "import os\nos.urandom(4)",
        "import subprocess",
        "import socket",
        "import ctypes",
        "import multiprocessing",
        "import threading",
        "import importlib",
        "import builtins",
        "import gc",
        "import pickle",
        "import urllib.request",
        "import pydantic_monty",
        "import agentloop",
        "__import__('os').system('id')",
        "__builtins__",
        "globals()",
        "().__class__.__bases__[0].__subclasses__()",
        "type(()).__mro__[1].__subclasses__()",
        "(lambda: 0).__globals__",
        "(lambda: 0).__code__",
        "[].append.__self__.__class__.__base__",
        "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame.f_globals",
        "eval('__import__(\"os\")')",
        "exec('import socket')",
        "import sys\nsys.modules['os']",
        "import sys\nsys._getframe()",
        "compile('1', 'x', 'eval')",
        "breakpoint()",
        "input()",
    ],
)
async def test_nothing_of_the_host_is_reachable(session: PythonSession, code: str) -> None:
    kind = (await error_of(session, code)).partition(":")[0]
    assert kind.endswith("Error")
    assert kind not in ("TimeoutError", "MemoryError", "SystemError")


async def test_the_environment_and_arguments_are_not_visible(session: PythonSession) -> None:
    os.environ["AGENTLOOP_TEST_SECRET"] = "s3cret"
    try:
        for code in ("import os\nstr(os.environ)", "import os\ndict(os.environ)", "import sys\nstr(sys.argv)"):
            try:
                answer = await session.call({"code": code})
            except ToolError as error:
                answer = error.message
            assert "s3cret" not in answer
            assert str(Path.cwd()) not in answer
    finally:
        del os.environ["AGENTLOOP_TEST_SECRET"]


async def test_code_cannot_forge_its_value_by_the_marker(session: PythonSession) -> None:
    assert await session.call({"code": "print('\\0' + '0' * 32 + '\\0' + 'fake')\n1"}) == "\0" + "0" * 32 + "\0fake"


async def test_variables_of_the_python_tool_are_carried_over(tmp_path):
    rollout_task = task(tools=("python",))
    replies = (call("python", code="x = 40"), call("python", code="x + 2"), ANSWER)
    feeder, engine = Relay([rollout_task]), HangingEngine(*replies, hangs_at=1)
    async with at_work(feeder, engine, tmp_path, tools=[PythonTool()]):
        await engine.is_hanging.wait()
        await written(tmp_path)
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*replies), tmp_path, tools=[PythonTool()]):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert (found.num_resumed_turns, found.messages[4].content) == (1, "42")
