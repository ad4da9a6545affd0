"""Environments and tools of others: MCP servers, Gymnasium, OpenEnv, folders of terminal tasks."""
