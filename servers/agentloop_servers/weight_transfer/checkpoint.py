"""The content of a folder of safetensors files, read from the headers without torch, and its fit to a model.

The format: header length (eight bytes, little-endian), JSON header (name -> dtype, shape, byte offsets), then the
bytes of all tensors without gaps. Every rule is checked, so a truncated or half-written file is found before an
engine overwrites its weights.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from agentloop.engine.interface import TensorInfo
from agentloop.engine.weight_digest import FileStamp, FolderContents, check_unchanged, content_digest, folder_stamps
from agentloop.errors import CheckpointUnreadable
from agentloop.values.checks import check_checkpoint

READ_CHUNK_BYTES = 2**17  # fits into a core's cache, where the chunk is read, hashed and checked
TIED_NAME = "lm_head.weight"
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""safetensors dtype -> torch's name and the bytes per element."""
_FLOATS = frozenset(name for name, _ in DTYPES.values())
EXPONENTS = {
    "F64": np.uint64(0x7FF0_0000_0000_0000),
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F8_E4M3": np.uint8(0x7F),  # no infinities, and one NaN of either sign
    "F8_E5M2": np.uint8(0x7C),
}
"""Bits that are all set in values that are not finite, and in no others."""


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in a file's header. `data_offsets` count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """The tensor's size in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors in byte order, the position of their first byte (`data_at`), and its metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_at: int


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The tensors of a checkpoint folder by name, its files, its size, and the files' stamps."""

    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    num_bytes: int
    stamps: tuple[FileStamp, ...] = field(default=(), compare=False)


def inspect_checkpoint(directory: str) -> CheckpointInfo:
    """Read and check the headers of all safetensors files. Raises CheckpointUnreadable."""
    stamps = folder_stamps(directory)  # before anything is read, so that a later change is detected
    files = check_checkpoint(directory)
    tensors: dict[str, TensorInfo] = {}
    num_bytes = 0
    for path in files:
        entries = read_header(path).entries
        num_bytes += _check_layout(path, entries)
        for name, entry in entries.items():
            if name in tensors:
                raise _unreadable(path, f"tensor {name} occurs in two files")
            tensors[name] = TensorInfo(name, DTYPES[entry.dtype][0], tuple(entry.shape))
    return CheckpointInfo(tensors, files, num_bytes, stamps)


def check_fits(update: Mapping[str, TensorInfo], served: Mapping[str, TensorInfo], *, is_tied: bool) -> None:
    """Raise CheckpointUnreadable unless `update` has exactly the served model's tensors.

    With tied embeddings the output head is optional on both sides.
    """
    optional = {TIED_NAME} if is_tied else set()
    missing = sorted(served.keys() - update.keys() - optional)
    if missing:
        raise CheckpointUnreadable(
            f"{len(missing)} tensors of the served model are missing in the checkpoint, the first is "
            f"{missing[0]}: push all tensors of the model",
            param="directory",
        )
    check_known(update, served, is_tied=is_tied)


def check_known(update: Mapping[str, TensorInfo], served: Mapping[str, TensorInfo], *, is_tied: bool) -> None:
    """Raise CheckpointUnreadable if a tensor of `update` is not in the served model or has another shape."""
    optional = {TIED_NAME} if is_tied else set()
    unknown = sorted(update.keys() - served.keys() - optional)
    if unknown:
        raise CheckpointUnreadable(
            f"{len(unknown)} tensors of the checkpoint are not in the served model, the first is {unknown[0]}: "
            "push weights of the served architecture, with the checkpoint's names",
            param="directory",
        )
    for name in sorted(update.keys() & served.keys()):
        have, want = update[name].shape, served[name].shape
        if have != want:
            raise CheckpointUnreadable(
                f"tensor {name} has shape {have}, but the served model has {want}: push weights of the served "
                "architecture",
                param="directory",
            )


def has_tied_embeddings(directory: str) -> bool:
    """Return True if the folder's `config.json` ties the output head to the input embeddings."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{path.name}: {error}", param="directory") from error
    if not isinstance(config, dict):
        return False
    text = config.get("text_config")  # present for a model with image input
    inner = text.get("tie_word_embeddings", False) if isinstance(text, dict) else False
    return bool(config.get("tie_word_embeddings", inner))


def read_through(checkpoint: CheckpointInfo) -> dict[str, str]:
    """Read every byte once, so that the commit reads from the page cache. Blocks.

    Returns the xxh3-128 of each tensor's bytes by name. Raises CheckpointUnreadable for read errors, and for NaN
    or infinite values.
    """
    hashes: dict[str, str] = {}
    for path in checkpoint.files:
        header = read_header(path)
        try:
            with path.open("rb", buffering=0) as file:
                for name, entry in header.entries.items():
                    file.seek(header.data_at + entry.data_offsets[0])
                    state = xxhash.xxh3_128()
                    if not all(_are_finite(file, entry.num_bytes, EXPONENTS[entry.dtype], state)):
                        raise _unreadable(path, not_finite(name))
                    hashes[name] = state.hexdigest()
        except OSError as error:
            raise _unreadable(path, str(error)) from error
    return hashes


def read_contents(directory: str, checkpoint: CheckpointInfo, *, is_tied: bool = False) -> FolderContents:
    """Read a folder as `read_through` does. `is_tied` means that the model ties its output head. Blocks.

    Raises CheckpointUnreadable, also if a file has changed since its header was read.
    """
    try:
        hashes = read_through(checkpoint)
    finally:  # A change explains every other error of these files, so it is reported first.
        check_unchanged(directory, checkpoint.stamps)
    if is_tied:
        check_tied(head_and_twins(checkpoint.tensors.values()), hashes)
    codes = {dtype: code for code, (dtype, _) in DTYPES.items()}
    tensors = {name: (codes[one.dtype], one.shape, hashes[name]) for name, one in checkpoint.tensors.items()}
    return FolderContents(content_digest(tensors, directory), checkpoint.num_bytes, checkpoint.stamps)


def folder_reader(model: str) -> Callable[[str], Awaitable[FolderContents]]:
    """Return a reader of folders for a simulated engine.

    It accepts any tensors, with a head tied as in the model.
    """
    is_tied = has_tied_embeddings(model)

    async def read(directory: str) -> FolderContents:
        checkpoint = await asyncio.to_thread(inspect_checkpoint, directory)
        return await asyncio.to_thread(read_contents, directory, checkpoint, is_tied=is_tied)

    return read


def head_and_twins(tensors: Iterable[TensorInfo]) -> list[str]:
    """Return the names of the output head and of all tensors with its dtype and shape, one of which is the
    embeddings.

    Empty if there is no output head.
    """
    by_name = {one.name: one for one in tensors}
    if (head := by_name.pop(TIED_NAME, None)) is None:
        return []
    return [
        TIED_NAME,
        *(one.name for one in by_name.values() if (one.dtype, one.shape) == (head.dtype, head.shape)),
    ]


def check_tied(names: Sequence[str], sums: Mapping[str, object]) -> None:
    """Check the output head of an update for a model that ties it. `names` is the result of `head_and_twins`.

    An engine that ties the head uses the embeddings and would drop a different head. `sums` has hashes or
    checksums by name. Raises CheckpointUnreadable unless the head equals one of the other tensors.
    """
    if names and sums[names[0]] not in [sums[name] for name in names[1:]]:
        raise CheckpointUnreadable(
            f"{TIED_NAME} has other values than the embeddings, and the served model ties them "
            "(tie_word_embeddings in its config.json): leave the head out, or serve a model that does not tie them",
            param="directory",
        )


def not_finite(name: str) -> str:
    """Return the error message for a tensor with NaN or infinite values."""
    return f"tensor {name} has values that are not finite numbers (NaN or infinite)"


class ServedForm:
    """The names and shapes of the served model's tensors, against which every update is checked."""

    def __init__(self, model: str, *, is_dummy: bool) -> None:
        """Read the folder `model`. Raises CheckpointUnreadable.

        For dummy weights without files, the first committed update defines the form.
        """
        self.is_tied = has_tied_embeddings(model)
        has_weights = not is_dummy or any(Path(model).glob("*.safetensors"))
        self._served = inspect_checkpoint(model).tensors if has_weights else None
        self._offered: Mapping[str, TensorInfo] | None = None  # the tensors that were checked last

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The served tensors; empty while unknown."""
        return tuple(self._served.values()) if self._served is not None else ()

    def check_directory(self, directory: str) -> tuple[tuple[TensorInfo, ...], FolderContents]:
        """Check a folder and read all of it. Blocks. Raises CheckpointUnreadable."""
        checkpoint = inspect_checkpoint(directory)
        self._check(checkpoint.tensors)
        contents = read_contents(directory, checkpoint, is_tied=self.is_tied)
        return tuple(checkpoint.tensors.values()), contents

    def check_push(self, tensors: Sequence[TensorInfo]) -> None:
        """Check the tensors of a push. Raises CheckpointUnreadable."""
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) < len(tensors):
            raise CheckpointUnreadable("the push has duplicate tensor names: send each tensor once", param="push")
        self._check(by_name)

    def check_part(self, tensors: Sequence[TensorInfo], earlier: Mapping[str, TensorInfo]) -> None:
        """Check the tensors of a transfer's part that follows `earlier` tensors. Raises CheckpointUnreadable."""
        seen = set(earlier)
        for tensor in tensors:
            if tensor.name in seen:
                raise CheckpointUnreadable(f"tensor {tensor.name} was already sent in this transfer", param="names")
            if tensor.dtype not in _FLOATS or min(tensor.shape, default=0) < 0:
                raise CheckpointUnreadable(
                    f"tensor {tensor.name} has an invalid dtype {tensor.dtype!r} or shape {tensor.shape}",
                    param="dtype_names",
                )
            seen.add(tensor.name)
        if self._served is not None:
            check_known({one.name: one for one in tensors}, self._served, is_tied=self.is_tied)

    def confirm(self) -> None:
        """Use the update that was checked last as the served form, if that is not known yet."""
        self._served = self._served or self._offered

    def _check(self, offered: Mapping[str, TensorInfo]) -> None:
        if self._served is not None:
            check_fits(offered, self._served, is_tied=self.is_tied)
        self._offered = offered


def read_header(path: Path) -> Header:
    """Read the header of a file that `check_checkpoint` has accepted. Raises CheckpointUnreadable."""
    try:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=Entry) for name, raw in fields.items()}
        in_order = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
        return Header(in_order, metadata, 8 + len(header))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"not a safetensors header: {error}") from error


def _check_layout(path: Path, entries: Mapping[str, Entry]) -> int:
    """Return the bytes of all tensors. Raises CheckpointUnreadable unless they are floats without gaps."""
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise _unreadable(path, f"tensor {name} has dtype {entry.dtype}, not a float type")
        _, size = DTYPES[entry.dtype]
        is_whole = entry.num_bytes == size * math.prod(entry.shape) and min(entry.shape, default=0) >= 0
        if entry.data_offsets[0] != end or not is_whole:
            raise _unreadable(path, f"tensor {name} has offsets that do not fit its shape or leave a gap")
        end = entry.data_offsets[1]
    return end


def _are_finite(file: RawIOBase, num_bytes: int, exponent: Any, state: Any) -> Iterator[bool]:
    """Read the next `num_bytes` of a file in chunks, and hash them into `state`.

    Yields for each chunk whether all its values are finite.
    """
    chunk: Any = np.empty(READ_CHUNK_BYTES, dtype=np.uint8)
    while num_bytes > 0:
        num_read = 0
        wanted = min(num_bytes, READ_CHUNK_BYTES)
        while num_read < wanted:
            got = file.readinto(memoryview(chunk)[num_read:wanted])
            if not got:
                raise OSError("the file ends too early")
            num_read += got
        num_bytes -= wanted
        state.update(memoryview(chunk)[:wanted])  # the chunk is in the core's cache
        bits = chunk[:wanted].view(exponent.dtype)
        yield bool(np.bitwise_and(bits, exponent, out=bits).max() < exponent)


def _unreadable(path: Path, reason: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"{path.name}: {reason}", param="directory")
