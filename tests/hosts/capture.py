"""Traffic on a test host's link: the bytes of its TCP connections, from the file that `link.py` records."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER_BYTES, _FRAME_HEADER, _ETHERNET_BYTES = 24, struct.Struct("<IIII"), 14
_IPV4, _TCP = 0x0800, 6

Flow = tuple[bytes, int, bytes, int]
"""One direction of a connection: source address and port, destination address and port."""


def flows(path: Path) -> dict[Flow, bytes]:
    """Return the bytes of each direction of each connection, in order."""
    segments: dict[Flow, dict[int, bytes]] = defaultdict(dict)
    for frame in _frames(path.read_bytes()):
        if int.from_bytes(frame[12:14]) != _IPV4 or frame[_ETHERNET_BYTES + 9] != _TCP:
            continue
        packet = frame[_ETHERNET_BYTES : _ETHERNET_BYTES + int.from_bytes(frame[16:18])]
        segment = packet[(packet[0] & 15) * 4 :]
        source, destination, number = struct.unpack_from(">HHI", segment)
        data = segment[(segment[12] >> 4) * 4 :]
        if data:
            segments[packet[12:16], source, packet[16:20], destination][number] = data
    return {flow: b"".join(data for _, data in sorted(found.items())) for flow, found in segments.items()}


def _frames(record: bytes) -> Iterator[bytes]:
    at = _FILE_HEADER_BYTES
    while at + _FRAME_HEADER.size <= len(record):
        size = _FRAME_HEADER.unpack_from(record, at)[2]
        at += _FRAME_HEADER.size
        yield record[at : at + size]
        at += size
