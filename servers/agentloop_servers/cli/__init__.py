"""The entry of the `agentloop` command: light, so that help, a typo and Ctrl-C are answered from the first moment.

A command's own module may import Ray and the whole service, which takes seconds; an interrupt in there would end in
a traceback from the middle of somebody's import.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType, ModuleType

from agentloop.plugins import install_hint


def main() -> None:
    """Run the console script. Until a command begins, Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, _leave)
    load("commands").app(prog_name="agentloop")


def load(module: str) -> ModuleType:
    """Import a module of the command line. Exits with one line where a package that it needs is not installed."""
    try:
        return importlib.import_module(f"agentloop_servers.cli.{module}")
    except ModuleNotFoundError as error:
        sys.exit(f"agentloop: {error.name} is not installed: {install_hint('serve')}")


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing has been started or written yet
