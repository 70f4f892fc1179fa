"""A command of the user's, run to its end in a process group of its own.

Invariant: when `run_command` leaves, on any path, no process of the group lives: first they are asked (SIGTERM),
after the grace they are killed. Output goes to temporary files without names, whose ends serve error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_TAIL_BYTES = 4096
_MAX_LINE_CHARS = 500


@dataclass(frozen=True, slots=True)
class CommandExit:
    """How a command ended: a negative `status` is the signal that killed it; the tails are of what it wrote."""

    status: int
    output_tail: str
    error_tail: str

    def describe(self) -> str:
        """One line for people, with the last line of the error output, or else of the other."""
        ending = f"exit status {self.status}" if self.status >= 0 else f"killed by signal {-self.status}"
        for tail in (self.error_tail, self.output_tail):
            lines = [line.strip() for line in tail.splitlines() if line.strip()]
            if lines:
                return f"{ending}: {lines[-1][-_MAX_LINE_CHARS:]}"
        return ending


async def run_command(arguments: Sequence[str], environment: Mapping[str, str], *, grace_s: float) -> CommandExit:
    """Run it without a shell and without input. A cancellation ends it. Raises OSError if it cannot be started."""
    # Two files: what a program has buffered of its output is written last, after the error that ended it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
            raise
        finally:
            _signal_group(process.pid, signal.SIGKILL)  # also what the command left behind
            await process.wait()
        return CommandExit(status, _tail(output), _tail(errors))


def _signal_group(group_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group_id, number)


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return output.read().decode(errors="replace")
