"""The `shell` tool: runs commands in a sandbox per trajectory, which the reward function can use too.

Isolation: that of its `Sandboxes`, by default `sandbox/bubblewrap.py`. On a host that cannot isolate commands, the
constructor raises an error with the reason, which `agentloop doctor` also shows. Therefore it is not a default
tool; enable it with `workers.tools: {shell: shell}`.

State: the folder `/task` and a shell session (current folder, exported variables, background processes). The folder
initially contains the task's files (`tool_setup: {"shell": {...}}`, see ShellSetup). After the loss of its worker,
a trajectory resumes with the folder after its last turn, if its tar file has at most MAX_STATE_BYTES, and a new
session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentloop import parts
from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout.tool import ToolSpec, parameters_schema, validated
from agentloop.types import JSON, RolloutTask
from agentloop_tools.sandbox.commands import answer, tar_of
from agentloop_tools.sandbox.grading import Grade, grade
from agentloop_tools.sandbox.port import (
    DEFAULT_LIMITS,
    FOLDER,
    Sandbox,
    Sandboxes,
    SandboxLimits,
    SandboxSource,
)

MAX_STATE_BYTES = 1 << 20  # size of a folder that can move to another worker
MAX_COMMAND_BYTES = 16_384
MAX_PATH_CHARS = 512
_CALLS_AT_ONCE = 8  # concurrent calls of one trajectory that the timeout allows for; they run one at a time


_DESCRIPTION = (
    "Run a command in a sandbox without network, first in the folder /task, and return what it prints and its exit "
    "status."
)


class _Arguments(BaseModel):  # without a docstring, which would be in the schema
    model_config = ConfigDict(extra="forbid")

    command: str = Field(
        description="A command line for bash. The current folder, exported variables and processes in the "
        "background stay for the next one; of files only those in /task are sure to."
    )


class ShellSetup(BaseModel):
    """A task's `tool_setup` for a shell."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, str] = {}  # text by path within the folder
    image: str | None = None  # must match the tool's `images`
    command: str | None = None  # run before the policy's first command; the task is invalid if it fails


class ShellTool:
    """The `shell` tool. It owns its sandboxes."""

    def __init__(
        self,
        *,
        name: str = "shell",
        limits: SandboxLimits = DEFAULT_LIMITS,
        sandboxes: Sandboxes | str = "bubblewrap",
        image: str | None = None,
        images: Sequence[str] = (),
        max_concurrency: int = 16,
        open_timeout_s: float = 60.0,
    ) -> None:
        """`image` is the default image. Tasks may select images that match a pattern in `images` (`fnmatch`).

        `sandboxes` may also be a registered name or the import path of a function without arguments. Raises
        InvalidRequest with param "tools" if the host cannot isolate commands.
        """
        self._limits = limits
        self._sandboxes: Sandboxes = (
            parts.find(parts.SANDBOXES, sandboxes, param="tools")() if isinstance(sandboxes, str) else sandboxes
        )
        self._image = image
        self._images = images
        self.spec = ToolSpec(
            name=name,
            description=_DESCRIPTION,
            parameters=parameters_schema(_Arguments),
            timeout_s=_CALLS_AT_ONCE * (limits.run_s + 5.0),
            max_output_bytes=limits.max_output_bytes + 512,
            max_concurrency=max_concurrency,
            open_timeout_s=open_timeout_s,
            close_timeout_s=30.0,
        )

    def open_session(self, trajectory_id: str, seed: int) -> ShellSession:
        return ShellSession(self)

    async def close(self) -> None:
        """Close the sandboxes. Idempotent."""
        await self._sandboxes.close()

    async def new_sandbox(self, image: str | None) -> Sandbox:
        """Create a trajectory's sandbox.

        Raises InvalidRequest for an image that tasks must not use, and ToolLost.
        """
        if image is not None and (
            ".." in image or not any(fnmatchcase(image, allowed) for allowed in self._images)
        ):
            raise InvalidRequest(f"image {image[:80]!r} is not allowed: it matches none of {list(self._images)}")
        return await self._sandboxes.create(SandboxSource(image=image or self._image), self._limits)


class ShellSession:
    """One trajectory's sandbox. Its commands run one at a time, in call order.

    A reward function with a parameter `tools` receives it by the tool's name. `grade` runs a hidden test in a copy
    of the sandbox, in which no code of the policy runs before the test.
    """

    def __init__(self, tool: ShellTool) -> None:
        self._tool = tool
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox. Raises ToolError if it is not open."""
        if self._sandbox is None:
            raise ToolError("the shell is not open")
        return self._sandbox

    async def open(self, task: RolloutTask) -> None:
        """Create the sandbox with the task's image and files. Raises InvalidRequest for an invalid setup."""
        try:
            setup = ShellSetup.model_validate(task.tool_setup.get(self._tool.spec.name) or {})
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, ("tool_setup", self._tool.spec.name, *first["loc"])))
            raise InvalidRequest(f"{path}: {first['msg']}") from error
        for path in setup.files:
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > MAX_PATH_CHARS:
                raise InvalidRequest(f"{path[:80]!r} is not a relative path within {FOLDER}")
        self._sandbox = await self._tool.new_sandbox(setup.image)
        try:
            if setup.files:
                await self._sandbox.put_tar(tar_of(setup.files))
            if setup.command is not None:
                answer(await self._sandbox.exec(setup.command))
        except ToolError as error:
            raise InvalidRequest(error.message) from error

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        command = validated(_Arguments, arguments)["command"]
        if len(command.encode(errors="replace")) > MAX_COMMAND_BYTES:
            raise ToolError(f"the command is longer than {MAX_COMMAND_BYTES} bytes")
        ran = await self.sandbox.exec(command)
        text = ran.output.decode(errors="replace").removesuffix("\n")
        cut = f"...[{ran.num_cut_bytes} bytes more]" if ran.num_cut_bytes else ""
        if ran.stopped is not None:
            raise ToolError("\n".join(filter(None, (f"killed: {ran.stopped}", text, cut))))
        status = f"[exit status {ran.status}]" if ran.status else ""
        return "\n".join(filter(None, (text, cut, status)))

    async def grade(
        self, command: str, files: Mapping[str, bytes | str] | None = None, limits: SandboxLimits | None = None
    ) -> Grade:
        """Run a hidden test in a copy of the sandbox, for a reward. See `sandbox/grading.py`."""
        return await grade(self.sandbox, command, files, limits)

    async def snapshot(self) -> bytes:
        """Return the folder as a tar file. Raises ToolError if it has more than MAX_STATE_BYTES."""
        return await self.sandbox.get_tar(MAX_STATE_BYTES)

    async def restore(self, state: bytes) -> None:
        """Replace the folder's content by the content of a tar file."""
        answer(await self.sandbox.exec(f"find {FOLDER} -mindepth 1 -delete"))
        await self.sandbox.put_tar(state)

    async def close(self) -> None:
        """Close the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()
