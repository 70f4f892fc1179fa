"""The entry point of the `agentloop` command. It imports little, so that help, typos and Ctrl-C are fast.

A command's own module may import Ray and the whole service, which takes seconds; an interrupt in there would end in
a traceback from within an import.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType, ModuleType

from agentloop.plugins import install_hint


def main() -> None:
    """Run the console script. Until a command begins, Ctrl-C ends the process immediately."""
    signal.signal(signal.SIGINT, _leave)
    load("commands").app(prog_name="agentloop")


def load(module: str) -> ModuleType:
    """Import a module of the command line. Exits with an error line if a package is not installed."""
    try:
        return importlib.import_module(f"agentloop_servers.cli.{module}")
    except ModuleNotFoundError as error:
        sys.exit(f"agentloop: {error.name} is not installed: {install_hint('serve')}")


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing has been started or written yet
