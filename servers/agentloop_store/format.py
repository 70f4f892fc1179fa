"""The format of a published version: an index, and safetensors files with checksums and, in deltas, zstd frames.

A full version is an ordinary checkpoint. A delta has the changed tensors alone, each a uint8 array: a zstd frame of
the bytes of new XOR old (`xor`), or of count, positions and new bytes (`overwrite`, little-endian u4). A file's
metadata maps a tensor to the checksum of its new whole bytes. Other publishers' versions have these fields too;
ours add `content`, a digest of all checksums, and `base_index`, the digest of the base's index: so an index names
its whole lineage. Everything read here is untrusted: file names hold no path, sizes are those of the base.
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
ZSTD_LEVEL = 1  # 3 gains nothing, 6 a tenth of the size in four times the time
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_MOST = 1 << 62  # as wide as an offset can be
_POSITIONS = np.dtype("<u4")
_SCATTER = 2**16  # values of an overwrite that are placed at once

Bytes = Any  # a one-dimensional uint8 array


class Encoding(StrEnum):
    """The form of a delta's tensors."""

    XOR = "xor"
    OVERWRITE = "overwrite"


class Hasher(Protocol):
    """A checksum under way."""

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
"""The kind that local versions use, whatever their publisher does."""

CHECKSUMS: Mapping[str, Callable[[], Hasher]] = {
    CHECKSUM: xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": _Adler32,
}


def digest(data: bytes) -> str:
    """Return the digest by which an index is named."""
    return xxhash.xxh3_128_hexdigest(data)


# --- indexes ---


@dataclass(frozen=True, slots=True)
class Index:
    """The index of one version: the file of each of its tensors. A full version has no base."""

    version: int
    files: Mapping[str, str]
    checksum: str | None  # None: a full version that another publisher wrote without
    base_version: int | None = None
    encoding: Encoding = Encoding.XOR
    base_index: str | None = None
    content: str = ""  # read as part of the index's digest, which has no other trace of the tensors' bytes
    raw: bytes = b""  # the file that it was read from

    def to_json(self) -> bytes:
        """Return the index file."""
        metadata = {"version": f"{self.version:06d}", "checksum_format": self.checksum, "content": self.content}
        if self.base_version is not None:
            metadata |= {"base_version": f"{self.base_version:06d}", "delta_encoding": self.encoding.value}
            metadata |= {"compression_format": COMPRESSION, "base_index": self.base_index}
        return msgspec.json.encode({"metadata": metadata, "weight_map": self.files})


class _Metadata(msgspec.Struct):
    version: int | str
    base_version: int | str | None = None
    delta_encoding: Encoding | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    base_index: str | None = None


class _IndexFile(msgspec.Struct):
    metadata: _Metadata
    weight_map: dict[str, str]


def read_index(data: bytes, version: int) -> Index:
    """Read the index of `version`. Raises VersionDamaged, WrongBase for a base that is not before it."""
    try:
        file = msgspec.json.decode(data, type=_IndexFile)
        said = file.metadata
        base = None if said.base_version is None else int(said.base_version)
        number = int(said.version)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise VersionDamaged(f"the index of version {version} cannot be read: {error}") from error
    if number != version:
        raise VersionDamaged(f"the index of version {version} says that it is {number}")
    if bad := next((name for name in file.weight_map.values() if not _FILE_NAME.fullmatch(name)), None):
        raise VersionDamaged(f"the index of version {version} names {bad[:80]!r}, which is no file beside it")
    if base is None:
        if said.checksum_format not in (None, *CHECKSUMS):
            raise VersionDamaged(f"version {version} has checksums of a kind that is not known")
        return Index(version, file.weight_map, said.checksum_format, raw=data)
    if base >= version:
        raise WrongBase(f"version {version} is a delta to {base}, which is not before it")
    if (
        said.delta_encoding is None
        or said.checksum_format not in CHECKSUMS
        or said.compression_format != COMPRESSION
    ):
        raise VersionDamaged(f"version {version} is a delta of an encoding, compression or checksum not known")
    encoding = said.delta_encoding
    return Index(version, file.weight_map, said.checksum_format, base, encoding, said.base_index, raw=data)


# --- files ---


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, where its bytes begin there, and the checksum that the file has of it."""

    name: str
    path: Path
    at: int
    entry: Entry
    checksum: str | None

    def read(self) -> Bytes:
        """Read its bytes. Raises VersionDamaged for a file that is cut off, or a disk that cannot be read."""
        data = np.fromfile(self.path, np.uint8, self.entry.num_bytes, offset=self.at)
        if len(data) != self.entry.num_bytes:
            raise VersionDamaged(f"tensor {self.name} cannot be read whole from {self.path.name}")
        return data


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files, in their order there. Raises CheckpointUnreadable."""
    found: dict[str, StoredTensor] = {}
    for path in check_checkpoint(str(folder)):
        header = read_header(path)
        for name, entry in header.entries.items():
            first, end = entry.data_offsets
            if not 0 <= first <= end:
                raise CheckpointUnreadable(f"{path.name} has impossible offsets", param="directory")
            found[name] = StoredTensor(name, path, header.data_at + first, entry, header.metadata.get(name))
    return found


def read_files(folder: Path, index: Index) -> dict[str, StoredTensor]:
    """Return the tensors of a version. Raises VersionDamaged unless its files are whole, and those of the index."""
    try:
        found = stored_tensors(folder) if index.files else {}
    except CheckpointUnreadable as error:
        raise VersionDamaged(f"version {index.version}: {error.message}") from error
    if {name: one.path.name for name, one in found.items()} != dict(index.files):
        raise VersionDamaged(f"version {index.version}: its files do not have the tensors that its index names")
    return found


def chunks(data: Bytes) -> Iterator[Bytes]:
    """Cut a tensor's bytes into pieces that stay in a core's cache."""
    return (data[start : start + READ_CHUNK_BYTES] for start in range(0, len(data), READ_CHUNK_BYTES))


class TensorFile:
    """A safetensors file that is written tensor by tensor, as a context manager, which ends it.

    The header goes last, into room kept before the tensors. A file without tensors is removed.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Entry], checksum: str | None = None) -> None:
        """`tensors`: all that may come, in any order. `checksum`: the kind that `end` is given."""
        sums = dict.fromkeys(tensors, CHECKSUMS[checksum]().hexdigest()) if checksum else {}
        widest = {name: Entry(one.dtype, [*one.shape, _MOST], (_MOST, _MOST)) for name, one in tensors.items()}
        self._room = len(_header(widest, sums))
        self._room += -self._room % 8
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self._entries: dict[str, Entry] = {}
        self.checksums: dict[str, str] = {}
        self._end = 0  # of the last tensor
        self.write = self._file.write

    def end(self, name: str, dtype: str, shape: Sequence[int] | None = None, checksum: str = "") -> None:
        """End a tensor whose bytes were written. Without a shape it is flat, of one byte an element."""
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


# --- deltas ---


def encode_delta(encoding: Encoding, old: Bytes, new: Bytes, write: Callable[[bytes], object]) -> None:
    """Write what brings a tensor's bytes from `old` to `new`. Raises InvalidRequest for a tensor too large."""
    if encoding is Encoding.OVERWRITE and len(new) >= 1 << 32:
        raise InvalidRequest("`overwrite` has no positions beyond 4 GiB of a tensor: use `xor`", param="encoding")
    is_xor = encoding is Encoding.XOR
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(len(new) if is_xor else -1)
    for part in _differences(old, new) if is_xor else _overwrites(old, new):
        write(frame.compress(memoryview(part)))
    write(frame.flush())


def _differences(old: Bytes, new: Bytes) -> Iterator[Bytes]:
    return (np.bitwise_xor(*pair) for pair in zip(chunks(old), chunks(new), strict=True))


def _overwrites(old: Bytes, new: Bytes) -> Iterator[Bytes]:
    found = [np.flatnonzero(piece) + at * READ_CHUNK_BYTES for at, piece in enumerate(_differences(old, new))]
    places = np.concatenate([one.astype(_POSITIONS) for one in found])
    return (part.view(np.uint8) for part in (np.array([len(places)], _POSITIONS), places, new[places]))


def apply_delta(index: Index, packed: StoredTensor, tensor: Bytes) -> None:
    """Bring a tensor's bytes from the base's to those of a version, in place, and compare their checksum.

    Raises LayoutMismatch for a delta of another size, VersionDamaged for a frame that cannot be unpacked.
    """
    state = CHECKSUMS[index.checksum or ""]()
    with zstandard.ZstdDecompressor().stream_reader(packed.read()) as frame:
        try:
            (_apply_xor if index.encoding is Encoding.XOR else _apply_overwrite)(frame, tensor, state)
            if frame.read(1):
                raise LayoutMismatch("a delta is of a larger tensor than the base has")
        except zstandard.ZstdError as error:
            raise VersionDamaged(f"a delta cannot be unpacked: {error}") from error
    check_sum(state, packed)


def _apply_xor(frame: Any, tensor: Bytes, state: Hasher) -> None:
    piece = np.empty(min(READ_CHUNK_BYTES, len(tensor)), np.uint8)
    for part in chunks(tensor):
        np.bitwise_xor(part, _filled(frame, piece[: len(part)]), out=part)
        state.update(part)


def _apply_overwrite(frame: Any, tensor: Bytes, state: Hasher) -> None:
    num = int(_filled(frame, np.empty(4, np.uint8)).view(_POSITIONS)[0])
    if num > len(tensor):
        raise LayoutMismatch("a delta changes more bytes than the base's tensor has")
    places = _filled(frame, np.empty(4 * num, np.uint8)).view(_POSITIONS)
    piece = np.empty(min(_SCATTER, num), np.uint8)
    for start in range(0, num, _SCATTER):
        part = places[start : start + _SCATTER]
        if int(part.max()) >= len(tensor):
            raise LayoutMismatch("a delta changes bytes beyond the base's tensor")
        tensor[part] = _filled(frame, piece[: len(part)])
    state.update(tensor)


def _filled(frame: Any, target: Bytes) -> Bytes:
    """Read as many bytes as `target` has. Raises LayoutMismatch if the frame ends before."""
    view, at = memoryview(target), 0
    while at < len(target):
        got = frame.readinto(view[at:])
        if not got:
            raise LayoutMismatch("a delta is of a smaller tensor than the base has, or is cut off")
        at += got
    return target


def check_sum(state: Hasher, expected: StoredTensor) -> None:
    """Raise ChecksumMismatch unless a tensor's bytes are as published, VersionDamaged if it has no checksum."""
    if expected.checksum is None:
        missing = f"the metadata of {expected.path.name} has no checksum of tensor {expected.name}"
        raise VersionDamaged(f"{missing}, and the index has a checksum_format: publish the version again")
    if state.hexdigest() != expected.checksum:
        raise ChecksumMismatch(f"tensor {expected.name} is not what was published: its checksum differs")
