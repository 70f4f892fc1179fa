"""The public HTTP edge: rollouts, administration, and the application that serves them."""

from __future__ import annotations

from agentloop_servers.ingress.admin import ModeRules
from agentloop_servers.ingress.app import create_app

__all__ = ["ModeRules", "create_app"]
