"""Append-only log files that survive the death of their process.

A file is a sequence of frames: length, CRC-32, body. Appended frames survive a killed process, but not a power
failure, because there is no fsync. Readers skip a damaged frame and find the next frame by its checksum.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEAD = struct.Struct("<II")


def frame(body: bytes) -> bytes:
    """Return the frame of a non-empty body."""
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def open_log(path: Path, *, is_new: bool) -> int:
    """Open a log for appending and return its file descriptor.

    Raises OSError if a new log already exists or an old one is missing.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags | os.O_CREAT | os.O_EXCL if is_new else flags, 0o600)


def append(fd: int, frames: bytes) -> None:
    """Append all of the frames, or none. Raises OSError."""
    num_written = os.write(fd, frames)
    if num_written != len(frames):
        os.ftruncate(fd, os.fstat(fd).st_size - num_written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the valid frames of a file as (offset, end, body).

    A gap between frames, or bytes after the last one, are damaged or truncated frames.
    """
    start = 0
    while len(data) >= (at := start + _HEAD.size):
        size, crc = _HEAD.unpack_from(data, start)
        end = at + size
        if 0 < size <= len(data) - at and zlib.crc32(body := data[at:end]) == crc:
            yield start, end, body
            start = end
        else:
            start += 1
