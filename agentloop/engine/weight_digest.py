"""Digests that identify weights by content: name, dtype, shape and bytes of every source tensor.

A digest is independent of file names and order, of tensor parallelism, and of the kind and dtype of the engine,
which computes it while it reads a folder for staging. For adapters it includes the configuration, which scales the
tensors. Digests of pushes combine checksums that the sender and the workers compute on their devices; a prefix
distinguishes the two kinds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from agentloop.engine.interface import TensorInfo
from agentloop.errors import CheckpointUnreadable, ChecksumMismatch
from agentloop.values.checks import check_checkpoint

ADAPTER_CONFIG = "adapter_config.json"
_CHUNK_BYTES = 2**20
_CONTENT, _SUMS = "xxh3:", "sums:"

FileStamp = tuple[str, int, int, int, int]
"""A file's name, size, mtime (ns), ctime (ns) and inode. A copy that preserves the mtime changes the ctime."""


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The content of a weight folder when it was read."""

    digest: str
    num_bytes: int  # size of its safetensors files, or of the tensors in them
    stamps: tuple[FileStamp, ...]


class FolderDigests:
    """A cache of the folders that an engine read last. Entries are valid while the files' stamps are unchanged."""

    def __init__(self, num_folders: int = 8) -> None:
        self._num_folders = num_folders
        self._contents: dict[str, FolderContents] = {}

    def add(self, directory: str, contents: FolderContents) -> None:
        """Add the contents of a folder, and drop the oldest entries."""
        self._contents.pop(directory, None)
        self._contents[directory] = contents
        while len(self._contents) > self._num_folders:
            del self._contents[next(iter(self._contents))]

    def get(self, directory: str) -> FolderContents | None:
        """Return the cached contents of a folder with unchanged files; None if it must be read."""
        cached = self._contents.get(directory)
        return cached if cached is not None and cached.stamps == folder_stamps(directory) else None


def folder_stamps(directory: str) -> tuple[FileStamp, ...]:
    """Return the stamps of the files that a folder's digest covers. Missing files have no stamp."""
    stamps = []
    for path in (*sorted(Path(directory).glob("*.safetensors")), Path(directory) / ADAPTER_CONFIG):
        try:
            stat = path.stat()
        except OSError:
            continue
        stamps.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(stamps)


def check_unchanged(directory: str, stamps: Sequence[FileStamp]) -> None:
    """Raise CheckpointUnreadable, with a file name, if a folder has changed since `stamps` were taken."""
    # Compare without the ctime: a new hard link to a file changes only the ctime.
    before, now = ({(*stamp[:3], stamp[4]) for stamp in taken} for taken in (stamps, folder_stamps(directory)))
    if changed := sorted(before ^ now):
        raise CheckpointUnreadable(
            f"{changed[0][0]} in {directory} changed while the weights were staged: write each version into a new "
            "folder, and push it once it is complete",
            param="directory",
        )


def content_digest(tensors: Mapping[str, tuple[str, Sequence[int], str]], directory: str) -> str:
    """Return the digest of tensors, given by name as dtype (in safetensors' notation), shape and xxh3-128.

    Includes the adapter configuration in `directory`, if there is one.
    """
    lines = [f"{name!r} {dtype} {list(shape)} {hexdigest}" for name, (dtype, shape, hexdigest) in tensors.items()]
    if (config := Path(directory) / ADAPTER_CONFIG).is_file():
        lines.append(f"{ADAPTER_CONFIG} {xxhash.xxh3_128_hexdigest(config.read_bytes())}")
    return _CONTENT + xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def sums_digest(tensors: Sequence[TensorInfo], checksums: Sequence[int]) -> str:
    """Return the digest of a push from its tensors, in sending order, and the sender's checksums."""
    lines = [f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors]
    return _SUMS + xxhash.xxh3_128_hexdigest("\n".join([*lines, *map(str, checksums)]).encode())


def are_comparable(one: str, other: str) -> bool:
    """Return True if both digests are known and of the same kind."""
    return bool(one and other) and one.partition(":")[0] == other.partition(":")[0]


def check_digest(expected: str, found: str, name: str) -> None:
    """Raise ChecksumMismatch if the weights `name` do not have the digest `expected`. Empty accepts any digest."""
    if are_comparable(expected, found) and expected != found:
        raise ChecksumMismatch(
            f"the content of {name} has changed: its digest is {found}, but this version is served with the digest "
            f"{expected}. Restore the files, or push them as a new version",
            param="directory",
        )


async def read_files(directory: str) -> FolderContents:
    """Read a folder of weights or of an adapter, yielding to other tasks in between.

    Raises CheckpointUnreadable for invalid files, and for files that change while they are read.
    """
    stamps, num_bytes = folder_stamps(directory), 0
    tensors: dict[str, tuple[str, Sequence[int], str]] = {}
    try:
        for path in check_checkpoint(directory):
            num_bytes += path.stat().st_size
            for name, dtype, shape, pieces in _tensors(path):
                state = xxhash.xxh3_128()
                for piece in pieces:
                    state.update(piece)
                    await asyncio.sleep(0)
                tensors[name] = dtype, shape, state.hexdigest()
        contents = FolderContents(content_digest(tensors, directory), num_bytes, stamps)
    except OSError as error:
        raise CheckpointUnreadable(f"{directory} cannot be read: {error}", param="directory") from error
    check_unchanged(directory, stamps)
    return contents


def _tensors(path: Path) -> Iterator[tuple[str, str, Sequence[int], Iterator[bytes]]]:
    """Yield name, dtype, shape and bytes of every tensor of a file whose header was checked."""
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header = orjson.loads(file.read(num_header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                file.seek(8 + num_header_bytes + start)
                sizes = (min(_CHUNK_BYTES, end - at) for at in range(start, end, _CHUNK_BYTES))
                yield name, entry.get("dtype", ""), entry.get("shape", ()), map(file.read, sizes)
