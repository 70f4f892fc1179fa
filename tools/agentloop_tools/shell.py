"""The `shell` tool: commands in a bubblewrap sandbox, in a folder for each trajectory that its reward can look at.

Isolation, and what it leaves out: `sandbox.py`. A host that cannot give it has no such tool: its construction says
why, and so does `agentloop doctor`. So it is not among those that every worker has: a config names it,
`workers.tools: {shell: "agentloop_tools.shell:ShellTool"}`.

State: the folder, `/task`. It begins with the files that the task brings (`tool_setup: {"shell": {"files": {path:
text}}}`); each command is a process tree of its own, of which nothing else stays. A trajectory whose worker died
goes on with its folder as it was after its last turn, if that is no more than MAX_STATE_BYTES as a tar file.

A reward function with a parameter `tools` finds the session there, and may run commands and read files; both happen
in the sandbox too, so a link that the policy made leads nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout.tool import ToolSpec, arguments_model, parameters_schema, validated
from agentloop.types import JSON, RolloutTask
from agentloop_tools.sandbox import (
    SandboxLimits,
    SandboxRun,
    folder_use,
    give_to_sandbox,
    refusal,
    run_sandboxed,
)

MAX_STATE_BYTES = 1 << 20  # of a folder that can be carried to another worker
MAX_COMMAND_BYTES = 16_384
DEFAULT_LIMITS = SandboxLimits()
MAX_PATH_CHARS = 512
_CALLS_AT_ONCE = 8  # of one trajectory: they run one after the other


def _signature(
    command: Annotated[str, Field(description="A command line for bash. No network; only files in /task stay.")],
) -> None:
    """Run a command in a sandbox, in the folder /task, and return what it prints and its exit status."""


_ARGUMENTS = arguments_model(_signature)


class ShellSetup(BaseModel):
    """A task's `tool_setup` for a shell."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, str] = {}  # text by path within the folder


class ShellTool:
    """The tool; owns the folders of its trajectories, below one of its own that goes with it."""

    def __init__(
        self,
        *,
        name: str = "shell",
        limits: SandboxLimits = DEFAULT_LIMITS,
        read_only: Sequence[str | Path] = (),
        max_concurrency: int = 16,
    ) -> None:
        """`read_only` are folders of the host that commands see, where they are. Raises InvalidRequest, with param
        "tools", where the host cannot isolate commands."""
        self._limits = limits
        self._read_only = [Path(path).resolve() for path in read_only]
        self._lock, self._base = _own_base()
        try:
            self._refuse(refusal(self._base))
        except InvalidRequest:
            self._remove()
            raise
        self._shell = "bash" if shutil.which("bash") else "sh"
        self._spec = ToolSpec(
            name=name,
            description=_signature.__doc__ or "",
            parameters=parameters_schema(_ARGUMENTS),
            timeout_s=_CALLS_AT_ONCE * (limits.run_s + 5.0),
            max_output_bytes=limits.max_output_bytes + 512,
            max_concurrency=max_concurrency,
            open_timeout_s=30.0,
            close_timeout_s=30.0,
        )

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def open_session(self, trajectory_id: str, seed: int) -> ShellSession:
        return ShellSession(self)

    async def close(self) -> None:
        """Remove what is left of folders. Idempotent."""
        await asyncio.to_thread(self._remove)

    def new_folder(self) -> Path:
        """Make a trajectory's folder. Raises OSError."""
        folder = Path(tempfile.mkdtemp(dir=self._base))
        give_to_sandbox(folder)
        return folder

    async def run(
        self, folder: Path, command: str, limits: SandboxLimits | None = None, given: bytes = b""
    ) -> SandboxRun:
        """Run a command line with a folder. Raises OSError."""
        limits = self._limits if limits is None else limits
        arguments = [self._shell, "-c", command]
        return await run_sandboxed(folder, arguments, limits, given=given, read_only=self._read_only)

    @property
    def limits(self) -> SandboxLimits:
        """The bounds of a command."""
        return self._limits

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise InvalidRequest(f"the shell tool cannot run here: {reason}", param="tools")

    def _remove(self) -> None:
        remove_tree(self._base)
        with contextlib.suppress(OSError):
            os.close(self._lock)


class ShellSession:
    """One trajectory's folder. Its commands run one after the other, in the order they were made."""

    def __init__(self, tool: ShellTool) -> None:
        self._tool = tool
        self._folder: Path | None = None
        self._turn = asyncio.Lock()

    async def open(self, task: RolloutTask) -> None:
        """Make the folder, with the task's files. Raises InvalidRequest for files that cannot be there."""
        try:
            setup = ShellSetup.model_validate(task.tool_setup.get(self._tool.spec.name) or {})
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for path in setup.files:
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > MAX_PATH_CHARS:
                raise InvalidRequest(f"{path[:80]!r} is no path within the folder")
        self._folder = self._tool.new_folder()
        await asyncio.to_thread(_write, self._folder, setup.files)
        if (excess := folder_use(self._folder, self._tool.limits).excess(self._tool.limits)) is not None:
            raise InvalidRequest(excess)

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        command = validated(_ARGUMENTS, arguments)["command"]
        if "\0" in command or len(command.encode(errors="replace")) > MAX_COMMAND_BYTES:
            raise ToolError(f"a command has no NUL, and at most {MAX_COMMAND_BYTES} bytes")
        ran = await self.run(command)
        text = ran.output.decode(errors="replace").removesuffix("\n")
        notes = [f"...[{ran.num_cut_bytes} bytes more]"] if ran.num_cut_bytes else []
        if ran.stopped is not None:
            raise ToolError("\n".join([f"killed: {ran.stopped}", *([text] if text else []), *notes]))
        notes += [f"[exit status {ran.status}]"] if ran.status else []
        return "\n".join([*([text] if text else []), *notes])

    async def run(self, command: str, limits: SandboxLimits | None = None, given: bytes = b"") -> SandboxRun:
        """Run a command line in the sandbox, with `given` as its input. For rewards, too: a test, say."""
        if self._folder is None:
            raise ToolError("the shell is not open")
        async with self._turn:
            return await self._tool.run(self._folder, command, limits, given)

    async def read(self, path: str) -> bytes:
        """Return a file of the folder, as far as the limit of output goes. Raises ToolError if there is none."""
        ran = await self.run(f"cat -- {_quoted(path)}")
        if ran.status != 0:
            raise ToolError(ran.output.decode(errors="replace"))
        return ran.output

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the folder, whose own folder is there. Raises ToolError if it cannot be written."""
        ran = await self.run(f"cat > {_quoted(path)}", given=data)
        if ran.status != 0:
            raise ToolError(ran.output.decode(errors="replace"))

    async def snapshot(self) -> bytes:
        """Return the folder as a tar file. Raises ToolError if that is too long."""
        ran = await self.run("tar -cf - .", SandboxLimits(max_output_bytes=MAX_STATE_BYTES))
        if ran.status != 0 or ran.num_cut_bytes or ran.stopped:
            raise ToolError(f"the folder is no tar file of {MAX_STATE_BYTES >> 10} KiB")
        return ran.output

    async def restore(self, state: bytes) -> None:
        """Replace the folder's content by that of a tar file."""
        ran = await self.run("find . -mindepth 1 -delete && tar -xpf -", given=state)
        if ran.status != 0 or ran.stopped:
            raise ToolError(f"the folder cannot be restored: {ran.output.decode(errors='replace')[:200]}")

    async def close(self) -> None:
        """Remove the folder."""
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove_tree, folder)


def _quoted(path: str) -> str:
    """Quote a path for the shell; one that begins with a dash is a path still."""
    quoted = (path if path.startswith("/") else f"./{path}").replace("'", "'\\''")
    return f"'{quoted}'"


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write a task's files into a folder that nobody else has seen yet."""
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="replace")
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            give_to_sandbox(Path(parent, name))


def _own_base() -> tuple[int, Path]:
    """Make the folder of a tool, locked while this process lives; remove those of processes that died."""
    root = Path(tempfile.gettempdir()) / f"agentloop-shell-{os.geteuid()}"
    root.mkdir(mode=0o711, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise InvalidRequest(f"{root} is somebody else's", param="tools")
    with (root / ".lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)  # or another process would remove ours before it is locked
        for left in root.iterdir():
            with contextlib.suppress(OSError):
                held = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(left)
                finally:
                    os.close(held)
        base = Path(tempfile.mkdtemp(dir=root, prefix=f"{os.getpid()}-"))
        base.chmod(0o711)
        lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock, base


def remove_tree(folder: Path) -> None:
    """Remove a folder that a policy wrote to, of any depth and any permissions; follows no link. Idempotent."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # what the policy has shut, or nested without end
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
