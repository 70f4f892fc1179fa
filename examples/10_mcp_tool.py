"""An MCP server as tools. This one is below, over stdio, with a process for each trajectory; a config names it:

    workers:
      tools: {notebook: "examples.10_mcp_tool:notebook"}

Tasks then use the names that the server lists, `write` and `read`. A server elsewhere is named by its URL, shared:
`McpTools("https://search.example/mcp", names=["search"], headers={"authorization": "Bearer ..."})`.
"""

import sys

from mcp.server import MCPServer

from agentloop_tools.mcp import McpTools

notebook = McpTools([sys.executable, __file__], is_shared=False)

server = MCPServer("notebook")
lines: list[str] = []


@server.tool()
def write(line: str) -> str:
    """Write a line into the notebook."""
    lines.append(line)
    return f"{len(lines)} lines"


@server.tool()
def read() -> str:
    """Read the notebook."""
    return "\n".join(lines)


if __name__ == "__main__":
    server.run(transport="stdio")
