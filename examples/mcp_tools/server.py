"""An MCP server: the stock of a thousand stores, which nobody else knows. Runs with `python server.py`."""

import hashlib

from mcp.server import MCPServer

server = MCPServer("stores")


def amount(store: str, item: str) -> str:
    return str(int(hashlib.sha256(f"{store} {item}".encode()).hexdigest(), 16) % 90 + 10)


@server.tool()
def stock(store: str, item: str) -> str:
    """How many of an item a store has."""
    return amount(store, item)


if __name__ == "__main__":
    server.run()
