"""Grading of the files in a policy's sandbox: runs a test in a copy and trusts only a random token that it prints.

The exit status is not sufficient, because policy code that the test imports can exit the process with status 0. A
random token replaces the word `VERDICT`, and the last statement of the test prints it.

No code of the policy runs before the test. The copy has none of its processes and variables, HOME and Python's user
folder are new, Python searches `/task` for modules last (`PYTHONSAFEPATH`, Python 3.11 or newer), and pytest
ignores `conftest.py` and configuration files there.

Policy code can still find the token in the test's process or files. If that matters, run the policy's program as a
separate process and compare its output in the reward (examples/15_repair.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from agentloop_tools.sandbox.commands import tar_of
from agentloop_tools.sandbox.port import FOLDER, Sandbox, SandboxLimits, SandboxRun

VERDICT = "AGENTLOOP_VERDICT"
"""The word in the command and the files of `grade` that is replaced by the token."""

_HOME = "/tmp/.grader"
_SETUP = f"""
mkdir -p {_HOME} && cd {_HOME} || exit 125
echo 'import sys; sys.path.append("{FOLDER}")' > sitecustomize.py && echo '[pytest]' > pytest.ini || exit 125
export HOME={_HOME} PYTHONPATH={_HOME} PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
export PYTEST_ADDOPTS='-c {_HOME}/pytest.ini --rootdir={FOLDER} --noconftest -p no:cacheprovider'
cd {FOLDER} || exit 125
"""


@dataclass(frozen=True, slots=True)
class Grade(SandboxRun):
    """The result of a test. It has passed if it printed the token, regardless of its `status`."""

    has_passed: bool = False


async def grade(
    sandbox: Sandbox,
    command: str,
    files: Mapping[str, bytes | str] | None = None,
    limits: SandboxLimits | None = None,
) -> Grade:
    """Run a command in a copy of a sandbox, in which `files` are added or replaced.

    The token replaces the word `VERDICT` in the command and the files. Raises ToolError for files that exceed the
    limits, and ToolLost.
    """
    token = secrets.token_hex(16)
    copy = await sandbox.fork()
    try:
        if files:
            await copy.put_tar(tar_of({path: _with_token(content, token) for path, content in files.items()}))
        ran = await copy.exec(_SETUP + command.replace(VERDICT, token), limits)
    finally:
        await copy.close()
    has_passed = token.encode() in ran.output.split()
    return Grade(ran.status, ran.output, ran.num_cut_bytes, ran.stopped, has_passed)


def _with_token(content: bytes | str, token: str) -> bytes:
    data = content.encode(errors="replace") if isinstance(content, str) else content
    return data.replace(VERDICT.encode(), token.encode())
