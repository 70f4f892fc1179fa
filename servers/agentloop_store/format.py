"""The format of a published version: an index, and safetensors files with checksums and, in deltas, zstd frames.

A full version is an ordinary checkpoint. A delta contains only the changed tensors, each as a uint8 array: a zstd
frame of new XOR old bytes (`xor`), or of count, positions and new bytes (`overwrite`, little-endian u4). A file's
metadata maps each tensor to the checksum of its complete new bytes. Our indexes extend those of other publishers
with `content`, a digest of all checksums, and `base_index`, the digest of the base's index, which identifies the
chain of deltas. Input is untrusted: file names must not contain a path, and sizes must match the base.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np
import xxhash
import zstandard

from agentloop.errors import (
    CheckpointUnreadable,
    ChecksumMismatch,
    InvalidRequest,
    LayoutMismatch,
    VersionDamaged,
    WrongBase,
)
from agentloop.values.checks import check_checkpoint
from agentloop_servers.weight_transfer.checkpoint import READ_CHUNK_BYTES, Entry, read_header

INDEX_NAME = "model.safetensors.index.json"
COMPRESSION = "zstd"
ZSTD_LEVEL = 1  # level 3 does not compress better; level 6 saves 10% but takes four times as long
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_MOST = 1 << 62  # the widest offset, to compute the header's maximum size
_POSITIONS = np.dtype("<u4")
_SCATTER = 2**16  # values of an overwrite that are written at a time

Bytes = Any  # a one-dimensional uint8 array


class Encoding(StrEnum):
    """The encoding of a delta's tensors."""

    XOR = "xor"
    OVERWRITE = "overwrite"


class Hasher(Protocol):
    """An incremental checksum."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUM = "xxh3-128"
"""The checksum of local versions, independent of the publisher's."""

CHECKSUMS: Mapping[str, Callable[[], Hasher]] = {
    CHECKSUM: xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": _Adler32,
}


def digest(data: bytes) -> str:
    """Return the digest that identifies an index file."""
    return xxhash.xxh3_128_hexdigest(data)


# Indexes


@dataclass(frozen=True, slots=True)
class Index:
    """The index of one version."""

    version: int
    files: Mapping[str, str]  # file name by tensor name
    checksum: str | None  # None: a full version of another publisher without checksums
    base_version: int | None = None  # None: a full version
    encoding: Encoding = Encoding.XOR
    base_index: str | None = None
    content: str = ""  # makes the digest of the index depend on the tensors' bytes
    raw: bytes = b""  # the index file that was read

    def to_json(self) -> bytes:
        """Return the contents of the index file."""
        metadata = {"version": f"{self.version:06d}", "checksum_format": self.checksum, "content": self.content}
        if self.base_version is not None:
            metadata |= {"base_version": f"{self.base_version:06d}", "delta_encoding": self.encoding.value}
            metadata |= {"compression_format": COMPRESSION, "base_index": self.base_index}
        return msgspec.json.encode({"metadata": metadata, "weight_map": self.files})


class _Metadata(msgspec.Struct):
    version: int | str = ""
    base_version: int | str | None = None
    delta_encoding: Encoding | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    base_index: str | None = None


class _IndexFile(msgspec.Struct):
    metadata: _Metadata
    weight_map: dict[str, str]


def read_index(data: bytes, version: int, names: Mapping[int, str] = MappingProxyType({})) -> Index:
    """Parse the index of `version`. Raises VersionDamaged, and WrongBase for a base that is not older.

    `names` are the names of versions whose publisher does not number them. A full version may then be any
    checkpoint; a delta contains its own name and the name of its base.
    """
    numbers: Mapping[Any, int] = {name: number for number, name in names.items()}
    try:
        file = msgspec.json.decode(data, type=_IndexFile)
        metadata, named = file.metadata, file.metadata.base_version
        base = None if named is None else int(numbers.get(named, named))
        number = version if names and base is None else int(numbers.get(metadata.version, metadata.version))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise VersionDamaged(f"the index of version {version} cannot be parsed: {error}") from error
    if number != version:
        raise VersionDamaged(f"the index of version {version} has the version number {number}")
    if bad := next((name for name in file.weight_map.values() if not _FILE_NAME.fullmatch(name)), None):
        raise VersionDamaged(f"the index of version {version} has the invalid file name {bad[:80]!r}")
    if base is None:
        if metadata.checksum_format not in (None, *CHECKSUMS):
            raise VersionDamaged(
                f"version {version} has the unknown checksum_format {str(metadata.checksum_format)[:80]!r}: "
                f"expected one of {', '.join(CHECKSUMS)}"
            )
        return Index(version, file.weight_map, metadata.checksum_format, raw=data)
    if base >= version:
        raise WrongBase(f"version {version} is a delta to version {base}, which is not older")
    if (
        metadata.delta_encoding is None
        or metadata.checksum_format not in CHECKSUMS
        or metadata.compression_format != COMPRESSION
    ):
        raise VersionDamaged(f"version {version} is a delta with an unknown encoding, compression or checksum")
    encoding = metadata.delta_encoding
    return Index(version, file.weight_map, metadata.checksum_format, base, encoding, metadata.base_index, raw=data)


# Files


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    name: str
    path: Path
    at: int  # offset of its bytes in the file
    entry: Entry
    checksum: str | None  # the checksum in the file's metadata

    def read(self) -> Bytes:
        """Read the tensor's bytes. Raises VersionDamaged if the file is truncated or unreadable."""
        data = np.fromfile(self.path, np.uint8, self.entry.num_bytes, offset=self.at)
        if len(data) != self.entry.num_bytes:
            raise VersionDamaged(f"tensor {self.name} is truncated in {self.path.name}")
        return data


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name, in file order. Raises CheckpointUnreadable."""
    tensors: dict[str, StoredTensor] = {}
    for path in check_checkpoint(str(folder)):
        header = read_header(path)
        for name, entry in header.entries.items():
            first, end = entry.data_offsets
            if not 0 <= first <= end:
                raise CheckpointUnreadable(f"{path.name} has invalid offsets for {name}", param="directory")
            tensors[name] = StoredTensor(name, path, header.data_at + first, entry, header.metadata.get(name))
    return tensors


def read_files(folder: Path, index: Index) -> dict[str, StoredTensor]:
    """Return the tensors of a version. Raises VersionDamaged unless its files are complete and match the index."""
    try:
        tensors = stored_tensors(folder) if index.files else {}
    except CheckpointUnreadable as error:
        raise VersionDamaged(f"version {index.version}: {error.message}") from error
    if {name: tensor.path.name for name, tensor in tensors.items()} != dict(index.files):
        raise VersionDamaged(f"version {index.version}: the tensors in its files differ from those in its index")
    return tensors


def chunks(data: Bytes) -> Iterator[Bytes]:
    """Split a tensor's bytes into pieces that fit into a core's cache."""
    return (data[start : start + READ_CHUNK_BYTES] for start in range(0, len(data), READ_CHUNK_BYTES))


class TensorFile:
    """A context manager that writes a safetensors file tensor by tensor.

    At exit the header is written into space that was reserved before the tensors. A file without tensors is
    removed.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Entry], checksum: str | None = None) -> None:
        """`tensors` are all tensors that may be written, in any order; `checksum` is the kind passed to `end`."""
        sums = dict.fromkeys(tensors, CHECKSUMS[checksum]().hexdigest()) if checksum else {}
        widest = {
            name: Entry(entry.dtype, [*entry.shape, _MOST], (_MOST, _MOST)) for name, entry in tensors.items()
        }
        self._room = len(_header(widest, sums))
        self._room += -self._room % 8
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self._entries: dict[str, Entry] = {}
        self.checksums: dict[str, str] = {}
        self._end = 0  # end of the last tensor
        self.write = self._file.write

    def end(self, name: str, dtype: str, shape: Sequence[int] | None = None, checksum: str = "") -> None:
        """End the tensor whose bytes were written. Without `shape` it is one-dimensional with one-byte elements."""
        end = self._file.tell() - 8 - self._room
        self._entries[name] = Entry(dtype, [end - self._end] if shape is None else list(shape), (self._end, end))
        self._end = end
        if checksum:
            self.checksums[name] = checksum

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if not self._entries:
                Path(self._file.name).unlink()
            elif kind is None:
                header = _header(self._entries, self.checksums).ljust(self._room)
                self._file.seek(0)
                self._file.write(struct.pack("<Q", self._room) + header)
                self._file.flush()
                os.fsync(self._file.fileno())


def _header(entries: Mapping[str, Entry], checksums: Mapping[str, str]) -> bytes:
    return msgspec.json.encode({"__metadata__": {"format": "pt", **checksums}, **entries})


# Deltas


def encode_delta(encoding: Encoding, old: Bytes, new: Bytes, write: Callable[[bytes], object]) -> None:
    """Write the delta of a tensor's bytes from `old` to `new`. Raises InvalidRequest for too large a tensor."""
    if encoding is Encoding.OVERWRITE and len(new) >= 1 << 32:
        raise InvalidRequest(
            "the encoding 'overwrite' supports tensors of less than 4 GiB: use 'xor'", param="encoding"
        )
    is_xor = encoding is Encoding.XOR
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(len(new) if is_xor else -1)
    for part in _differences(old, new) if is_xor else _overwrites(old, new):
        write(frame.compress(memoryview(part)))
    write(frame.flush())


def _differences(old: Bytes, new: Bytes) -> Iterator[Bytes]:
    return (np.bitwise_xor(*pair) for pair in zip(chunks(old), chunks(new), strict=True))


def _overwrites(old: Bytes, new: Bytes) -> Iterator[Bytes]:
    changed = [np.flatnonzero(piece) + at * READ_CHUNK_BYTES for at, piece in enumerate(_differences(old, new))]
    positions = np.concatenate([chunk.astype(_POSITIONS) for chunk in changed])
    return (part.view(np.uint8) for part in (np.array([len(positions)], _POSITIONS), positions, new[positions]))


def apply_delta(index: Index, packed: StoredTensor, tensor: Bytes) -> None:
    """Apply a delta to a tensor's bytes in place, and verify the checksum of the result.

    Raises LayoutMismatch for a delta of a different size, VersionDamaged for a corrupt frame, and ChecksumMismatch.
    """
    state = CHECKSUMS[index.checksum or ""]()
    with zstandard.ZstdDecompressor().stream_reader(packed.read()) as frame:
        try:
            (_apply_xor if index.encoding is Encoding.XOR else _apply_overwrite)(frame, tensor, state)
            if frame.read(1):
                raise LayoutMismatch(f"the delta of tensor {packed.name} is larger than the base's tensor")
        except zstandard.ZstdError as error:
            raise VersionDamaged(f"the delta of tensor {packed.name} cannot be decompressed: {error}") from error
    check_sum(state, packed)


def _apply_xor(frame: Any, tensor: Bytes, state: Hasher) -> None:
    piece = np.empty(min(READ_CHUNK_BYTES, len(tensor)), np.uint8)
    for part in chunks(tensor):
        np.bitwise_xor(part, _filled(frame, piece[: len(part)]), out=part)
        state.update(part)


def _apply_overwrite(frame: Any, tensor: Bytes, state: Hasher) -> None:
    num = int(_filled(frame, np.empty(4, np.uint8)).view(_POSITIONS)[0])
    if num > len(tensor):
        raise LayoutMismatch(
            f"a delta changes {num} bytes of a tensor that has {len(tensor)}: it was made for another base"
        )
    positions = _filled(frame, np.empty(4 * num, np.uint8)).view(_POSITIONS)
    piece = np.empty(min(_SCATTER, num), np.uint8)
    for start in range(0, num, _SCATTER):
        part = positions[start : start + _SCATTER]
        if int(part.max()) >= len(tensor):
            raise LayoutMismatch("a delta changes bytes after the end of the base's tensor")
        tensor[part] = _filled(frame, piece[: len(part)])
    state.update(tensor)


def _filled(frame: Any, target: Bytes) -> Bytes:
    """Fill `target` from the frame. Raises LayoutMismatch if the frame is too short."""
    view, at = memoryview(target), 0
    while at < len(target):
        num_read = frame.readinto(view[at:])
        if not num_read:
            raise LayoutMismatch("a delta is truncated, or smaller than the base's tensor")
        at += num_read
    return target


def check_sum(state: Hasher, expected: StoredTensor) -> None:
    """Raise ChecksumMismatch unless a tensor has its published checksum, and VersionDamaged if it has none."""
    if expected.checksum is None:
        missing = f"the metadata of {expected.path.name} has no checksum of tensor {expected.name}"
        raise VersionDamaged(f"{missing}, although the index has a checksum_format: publish the version again")
    if state.hexdigest() != expected.checksum:
        raise ChecksumMismatch(
            f"tensor {expected.name} has the checksum {state.hexdigest()}, but {expected.checksum} was published"
        )
