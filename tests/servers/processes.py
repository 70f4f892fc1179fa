"""Which processes descend from a command, by a variable of its environment, and which run a part of the service."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def processes_with(marker: str, grace_s: float = 10.0) -> list[str]:
    """Command lines of the processes that still have `marker` in their environment after a grace period."""
    give_up_at = time.monotonic() + grace_s
    while (found := _now(marker)) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return found


def deployed(kind: str) -> list[int]:
    """Process ids of one Serve deployment of this test's Ray."""
    out = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in out.splitlines() if f"ServeReplica:agentloop:{kind}" in line]


def _now(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found
