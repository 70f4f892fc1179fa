"""Tools that ship with the service, one a file. Each file's header says what isolation it gives."""

SHIPPED_TOOLS: dict[str, str] = {
    "calculator": "agentloop_tools.calculator:calculator",
    "python": "agentloop_tools.python:PythonTool",
}
"""Names a configuration may use, to import paths: naming one imports only its own dependencies."""

__all__ = ["SHIPPED_TOOLS", "sandbox"]
