"""The listening sockets of all processes of a test host, and their answers to unauthenticated clients."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import ssl
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.hosts.bed import ROOT, Host

_LISTEN = "0A"
_ANSWER_S = 3.0
GET = b"GET /status HTTP/1.1\r\nhost: stranger\r\nauthorization: Bearer admin-key\r\n\r\n"
HELLO = b"\0agentloop/1\0" + bytes(24)  # no process has this key


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket, and the command lines of the processes that hold it."""

    address: str
    port: int
    owners: frozenset[str]

    @property
    def is_open_to_others(self) -> bool:
        """Return True if another host can reach the socket."""
        return not ipaddress.ip_address(self.address).is_loopback

    def is_of(self, kind: str) -> bool:
        """Return True if a process of this kind holds the socket."""
        return any(kind in owner for owner in self.owners)


def listeners(host: Host) -> list[Listener]:
    """Return the listeners of a host, seen from outside it."""
    owners: dict[str, set[str]] = defaultdict(set)
    for process in host.processes():
        with suppress(OSError, psutil.Error):  # the process has ended
            command = " ".join(process.cmdline())
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                        owners[found[1]].add(command)
    return [Listener(address, port, frozenset(owners[inode])) for address, port, inode in _listening(host.init_pid)]


def _listening(pid: int) -> Iterator[tuple[str, int, str]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN:
                digits, _, port = local.partition(":")
                words = [int(word, 16) for word in re.findall("." * 8, digits)]
                address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
                yield str(getattr(address, "ipv4_mapped", None) or address), int(port, 16), inode


def documented() -> list[tuple[str, str]]:
    """Return the docs' table of ports: the port, and its listeners."""
    text = (ROOT / "docs" / "guides" / "cluster.md").read_text()
    table = text.partition("| port | listener | reached from |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return [(port, listener) for port, listener, _ in rows]


def told(
    stranger: Host, address: str, ports: list[int], said: bytes = GET, *, tls: bool = False
) -> dict[int, bytes]:
    """Return the answers of an address's listeners to a client's first bytes; the client keeps its side open."""
    command = [sys.executable, "-m", "tests.hosts.sockets", address, said.hex(), str(int(tls)), *map(str, ports)]
    answers = json.loads(stranger.run(command))
    return {int(port): bytes.fromhex(answer) for port, answer in answers.items()}


def _answer(address: str, port: int, said: bytes, tls: bool) -> bytes:
    answer = b""
    with suppress(OSError), socket.create_connection((address, port), _ANSWER_S) as connection:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = context.wrap_socket(connection)
        connection.sendall(said)
        while piece := connection.recv(65536):
            answer += piece
    return answer


def main(address: str, said: str, tls: str, *ports: str) -> None:
    with ThreadPoolExecutor(64) as threads:
        asked = {
            port: threads.submit(_answer, address, int(port), bytes.fromhex(said), tls == "1") for port in ports
        }
    print(json.dumps({port: answer.result().hex() for port, answer in asked.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
