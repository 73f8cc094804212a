"""Tools of MCP servers: processes, or addresses, that offer tools by the Model Context Protocol."""

from perdure.agent.mcp.server import McpServer

__all__ = ["McpServer"]
