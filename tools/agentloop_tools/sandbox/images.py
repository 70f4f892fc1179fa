"""Root file systems for bubblewrap sandboxes: this host's `/usr`, a folder, or an unpacked OCI image.

Images are read-only, because bubblewrap before 0.11 has no overlay: a task that changes its software must copy it
to `/task`. Images are stored by digest in a folder that several processes may share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentloop.errors import InvalidRequest, ToolLost

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_OURS = {"proc", "dev", "sys", "run", "tmp", "task"}  # top-level folders that are not taken from an image
_FETCH_S = 1800.0


@dataclass(frozen=True, slots=True)
class RootImage:
    """A root file system: bubblewrap's arguments for its mounts, its shell and its environment variables."""

    mounts: Sequence[str]
    shell: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def seeing(self, folders: Sequence[Path]) -> RootImage:
        """Return the image with additional read-only folders of this host, at the same paths."""
        mounts = [part for folder in folders for part in ("--ro-bind-try", str(folder), str(folder))]
        return replace(self, mounts=[*self.mounts, *mounts])


def host_image() -> RootImage:
    """Return a root with only this host's `/usr` and its libraries."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        mounts += _mounted(Path(name), name)
    for name in _ETC:
        mounts += ["--ro-bind-try", name, name]
    return RootImage(mounts, "bash" if shutil.which("bash") else "sh")


def folder_image(root: Path, variables: Mapping[str, str] | None = None) -> RootImage:
    """Return the root in a folder with the layout of a root file system."""
    mounts: list[str] = []
    for name in sorted(os.listdir(root)):
        if name not in _OURS:
            mounts += _mounted(root / name, f"/{name}")
    has_bash = any((root / folder / "bash").is_file() for folder in ("usr/bin", "bin"))
    return RootImage(mounts, "bash" if has_bash else "sh", variables or {})


def _mounted(path: Path, name: str) -> list[str]:
    if path.is_symlink():
        return ["--symlink", os.readlink(path), name]
    return ["--ro-bind", str(path), name] if path.exists() else []


class ImageStore:
    """Images by reference: a folder's path, or a reference for skopeo such as `docker://...` or `oci:PATH:TAG`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, asyncio.Future[RootImage]] = {}

    async def unpacked(self, reference: str) -> RootImage:
        """Return an image, which is fetched on first use. A cancelled call does not stop the fetch.

        Raises InvalidRequest if skopeo or umoci is not installed, and ToolLost if they fail.
        """
        image = self._images.get(reference)
        if image is None or (image.done() and image.exception() is not None):
            image = self._images[reference] = asyncio.ensure_future(self._fetched(reference))
        return await asyncio.shield(image)

    async def close(self) -> None:
        """Cancel running fetches."""
        for image in self._images.values():
            image.cancel()
        await asyncio.gather(*self._images.values(), return_exceptions=True)

    async def _fetched(self, reference: str) -> RootImage:
        if await asyncio.to_thread(Path(reference).is_dir):
            return folder_image(Path(reference))
        for program in ("skopeo", "umoci"):
            if shutil.which(program) is None:
                raise InvalidRequest(
                    f"image {reference!r} needs {program}, which is not installed: install it, or use a folder",
                    param="image",
                )
        digest = (await _output("skopeo", "inspect", "--format", "{{.Digest}}", reference)).strip()
        if not re.fullmatch(r"\w+:\w+", digest):
            raise ToolLost(
                f"image {reference}: 'skopeo inspect' printed {digest[:80]!r} instead of a digest: run it on this"
                " host to find the cause"
            )
        bundle = self._folder / digest.replace(":", "-")
        if not bundle.is_dir():
            await self._unpack(reference, bundle)
        config = json.loads((bundle / "config.json").read_bytes())
        variables = dict(assignment.partition("=")[::2] for assignment in config["process"].get("env") or [])
        variables = {name: value for name, value in variables.items() if name not in ("HOME", "TERM")}
        return folder_image(bundle / "rootfs", variables)

    async def _unpack(self, reference: str, bundle: Path) -> None:
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            await _output("skopeo", "copy", "--quiet", reference, f"oci:{folder}/oci:image")
            await _output("umoci", "unpack", "--rootless", "--image", f"{folder}/oci:image", f"{folder}/bundle")
            (folder / "bundle").chmod(0o755)
            with contextlib.suppress(OSError):  # another process has unpacked the same image
                (folder / "bundle").rename(bundle)


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_FETCH_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise ToolLost(f"{command[0]} {command[1]}: {lines[-1][:300]}")
    return output.decode()
