"""Append logs: small appends to a file that a process which dies leaves behind.

A file is a list of frames: length, CRC-32, body. What was appended survives a killed process, not a power cut:
nothing is synced. A damaged frame is passed over, and what follows it is found again by its checksum.
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
    """Return the frame of a body, which is not empty."""
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def open_log(path: Path, *, is_new: bool) -> int:
    """Open a log to append to it; returns its descriptor. Raises OSError: a new one exists, an old one does not."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags | os.O_CREAT | os.O_EXCL if is_new else flags, 0o600)


def append(fd: int, frames: bytes) -> None:
    """Append frames, all or none. Raises OSError."""
    num_written = os.write(fd, frames)
    if num_written != len(frames):
        os.ftruncate(fd, os.fstat(fd).st_size - num_written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the sound frames of a file: offset, end, body.

    A gap before a frame, or bytes behind the last one, are damage or a frame that was cut off.
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
