"""The entry of the `agentloop` command: light, so that Ctrl-C ends it cleanly from the first moment.

The commands import Ray and the whole service, which takes seconds; an interrupt in there would end in a
traceback from the middle of somebody's import.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the console script. Exits with one line where the service's packages are not installed."""
    signal.signal(signal.SIGINT, _leave)
    # The doctor needs neither Ray nor an engine: it answers in a second, also where one of them does not import.
    module = "doctor" if sys.argv[1:2] == ["doctor"] else "commands"
    try:
        commands = importlib.import_module(f"agentloop_servers.cli.{module}")
    except ModuleNotFoundError as error:
        sys.exit(f"agentloop: {error.name} is not installed: pip install 'agentloop[serve]'")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the one that asyncio replaces by its own
    commands.app()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing has been started or written yet
