"""Roots for bubblewrap sandboxes: this host's `/usr`, a folder, or an OCI image unpacked into a folder.

An image is read-only: bubblewrap before 0.11 knows no overlay, so a task that changes its software copies it to
`/task` first. Images are kept by digest, below one folder that several processes may share.
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
_OURS = {"proc", "dev", "sys", "run", "tmp", "task"}  # of a root: not an image's
_FETCH_S = 1800.0


@dataclass(frozen=True, slots=True)
class RootImage:
    """A root for sandboxes: bubblewrap's arguments for its mounts, its shell, and its environment variables."""

    mounts: Sequence[str]
    shell: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def seeing(self, folders: Sequence[Path]) -> RootImage:
        """Return the image with folders of this host, read-only, where they are."""
        shown = [part for folder in folders for part in ("--ro-bind-try", str(folder), str(folder))]
        return replace(self, mounts=[*self.mounts, *shown])


def host_image() -> RootImage:
    """Return this host's `/usr` with its libraries, and nothing else of its files."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        mounts += _mounted(Path(name), name)
    for name in _ETC:
        mounts += ["--ro-bind-try", name, name]
    return RootImage(mounts, "bash" if shutil.which("bash") else "sh")


def folder_image(root: Path, variables: Mapping[str, str] | None = None) -> RootImage:
    """Return a folder that is laid out as the root of a file system."""
    mounts: list[str] = []
    for name in sorted(os.listdir(root)):
        if name not in _OURS:
            mounts += _mounted(root / name, f"/{name}")
    has_bash = any((root / place / "bash").is_file() for place in ("usr/bin", "bin"))
    return RootImage(mounts, "bash" if has_bash else "sh", variables or {})


def _mounted(path: Path, name: str) -> list[str]:
    if path.is_symlink():
        return ["--symlink", os.readlink(path), name]
    return ["--ro-bind", str(path), name] if path.exists() else []


class ImageStore:
    """Images by reference: a folder's path, or what `skopeo` can copy, such as `docker://...` or `oci:PATH:TAG`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, asyncio.Future[RootImage]] = {}

    async def unpacked(self, reference: str) -> RootImage:
        """Return an image, fetched at its first use, and on when that is cancelled. Raises InvalidRequest without
        the programs, ToolLost if they fail."""
        image = self._images.get(reference)
        if image is None or (image.done() and image.exception() is not None):
            image = self._images[reference] = asyncio.ensure_future(self._fetched(reference))
        return await asyncio.shield(image)

    async def close(self) -> None:
        """End what is being fetched."""
        for image in self._images.values():
            image.cancel()
        await asyncio.gather(*self._images.values(), return_exceptions=True)

    async def _fetched(self, reference: str) -> RootImage:
        if await asyncio.to_thread(Path(reference).is_dir):
            return folder_image(Path(reference))
        for program in ("skopeo", "umoci"):
            if shutil.which(program) is None:
                raise InvalidRequest(f"{program} is not installed: no image but a folder", param="image")
        digest = (await _output("skopeo", "inspect", "--format", "{{.Digest}}", reference)).strip()
        if not re.fullmatch(r"\w+:\w+", digest):
            raise ToolLost(f"image {reference}: no digest, but {digest[:80]!r}")
        place = self._folder / digest.replace(":", "-")
        if not place.is_dir():
            await self._unpack(reference, place)
        config = json.loads((place / "config.json").read_bytes())
        variables = dict(one.partition("=")[::2] for one in config["process"].get("env") or [])
        variables = {name: value for name, value in variables.items() if name not in ("HOME", "TERM")}
        return folder_image(place / "rootfs", variables)

    async def _unpack(self, reference: str, place: Path) -> None:
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            await _output("skopeo", "copy", "--quiet", reference, f"oci:{folder}/oci:image")
            await _output("umoci", "unpack", "--rootless", "--image", f"{folder}/oci:image", f"{folder}/bundle")
            (folder / "bundle").chmod(0o755)
            with contextlib.suppress(OSError):  # another process has put it there
                (folder / "bundle").rename(place)


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
