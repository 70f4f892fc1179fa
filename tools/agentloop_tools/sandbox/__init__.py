"""Sandboxes behind one port. Each adapter's header says what isolation it gives."""

from agentloop_tools.sandbox.grading import VERDICT, Grade, grade
from agentloop_tools.sandbox.port import Sandbox, Sandboxes, SandboxLimits, SandboxRun, SandboxSource

__all__ = ["VERDICT", "Grade", "Sandbox", "SandboxLimits", "SandboxRun", "SandboxSource", "Sandboxes", "grade"]
