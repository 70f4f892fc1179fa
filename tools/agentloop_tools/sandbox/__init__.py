"""Sandboxes behind one interface. Each adapter's module docstring describes the isolation that it provides."""

from agentloop_tools.sandbox.grading import VERDICT, Grade, grade
from agentloop_tools.sandbox.port import Sandbox, Sandboxes, SandboxLimits, SandboxRun, SandboxSource

__all__ = ["VERDICT", "Grade", "Sandbox", "SandboxLimits", "SandboxRun", "SandboxSource", "Sandboxes", "grade"]
