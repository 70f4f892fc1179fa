"""`python -m agentloop_servers.cli`: the `agentloop` command where it is not installed."""

from __future__ import annotations

from agentloop_servers.cli import main

main()
