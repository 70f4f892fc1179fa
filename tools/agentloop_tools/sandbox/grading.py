"""Grade the files that a policy left in a sandbox: run a test in a copy, and trust only a token that it prints.

The exit status proves nothing: code of the policy that the test imports can end its process with status 0. So a
random token replaces the word `VERDICT`, and the test prints it in its last statement.

Nothing that the policy wrote runs before the test. The copy has none of its processes and variables, HOME and
Python's user folder are new, Python finds modules in `/task` only after its own (`PYTHONSAFEPATH`, Python 3.11 or
newer), and pytest reads neither `conftest.py` nor a configuration there.

It does not hide the token from policy code that searches the test's process or files for it. Where that matters,
run the policy's program as another process, and compare its output in the reward (examples/15_repair.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from agentloop_tools.sandbox.commands import tar_of
from agentloop_tools.sandbox.port import FOLDER, Sandbox, SandboxLimits, SandboxRun

VERDICT = "AGENTLOOP_VERDICT"
"""The word, in a command or a file of `grade`, that the token replaces."""

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
    """A run of a test. `has_passed` if it printed its token; `status` proves nothing."""

    has_passed: bool = False


async def grade(
    sandbox: Sandbox,
    command: str,
    files: Mapping[str, bytes | str] | None = None,
    limits: SandboxLimits | None = None,
) -> Grade:
    """Run a command in a copy of a sandbox, over whose files `files` are laid.

    The token replaces the word `VERDICT` in the command and in the files. Raises ToolError for files that do not
    fit, and ToolLost.
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
