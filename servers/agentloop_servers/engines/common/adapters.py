"""The files of the LoRA adapters that an engine serves, in a temporary folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from pathlib import Path

from agentloop.engine.weight_digest import FolderContents, check_unchanged
from agentloop.errors import EngineError
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint, read_contents
from agentloop_servers.weight_transfer.lora import CONFIG_FILE, WEIGHTS_FILE, check_adapter, write_zero_adapter


class AdapterFolder:
    """Copies of the adapters that are served by name, or a symbolic link to the policy adapter. Call `start` first.

    `path` is the link. It initially points to an adapter of zeros. The folder that it points to must not be removed
    while it is served.
    """

    def __init__(self, model: str, max_rank: int) -> None:
        """`model` is the folder of the base weights."""
        self._model = model
        self._max_rank = max_rank
        self._folder: Path | None = None

    def start(self) -> None:
        """Create the temporary folder."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="agentloop-lora-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    async def link_zeros(self) -> None:
        """Write an adapter of zeros and link to it. Raises CheckpointUnreadable."""
        zero = self._own() / "zero"
        zero.mkdir()
        await asyncio.to_thread(write_zero_adapter, self._model, str(zero))
        self.point_to(str(zero))

    @property
    def path(self) -> str:
        """The path of the symbolic link."""
        return str(self._link)

    def point_to(self, directory: str) -> None:
        """Replace the link's target with another adapter atomically."""
        following = self._own() / "next"
        following.unlink(missing_ok=True)
        following.symlink_to(Path(directory).resolve())
        following.replace(self._link)

    def check(self, directory: str) -> FolderContents:
        """Validate an adapter and read all its bytes, which fills the page cache. Blocks.

        Raises CheckpointUnreadable.
        """
        has_weights = any(Path(self._model).glob("*.safetensors"))
        served = inspect_checkpoint(self._model).tensors if has_weights else None
        checkpoint = inspect_checkpoint(directory)
        check_adapter(directory, self._max_rank, served)
        return read_contents(directory, checkpoint)

    def copy_of(self, number: int) -> str:
        """Return the path of copy `number`."""
        return str(self._own() / str(number))

    def copy(self, directory: str, number: int, contents: FolderContents) -> None:
        """Copy a validated adapter. Blocks. Raises OSError, and CheckpointUnreadable if its files have changed."""
        copy = Path(self.copy_of(number))
        copy.mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(Path(directory) / name, copy / name)
        check_unchanged(directory, contents.stamps)

    def remove(self, number: int) -> None:
        """Remove copy `number`, if it exists. Blocks."""
        shutil.rmtree(self.copy_of(number), ignore_errors=True)

    def close(self) -> None:
        """Remove the temporary folder. Idempotent; also called at garbage collection and process exit."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _link(self) -> Path:
        return self._own() / "served"

    def _own(self) -> Path:
        if self._folder is None:
            raise EngineError("the engine is not started: call start() first")
        return self._folder
