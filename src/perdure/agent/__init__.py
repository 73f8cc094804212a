"""The agent worker, its bootstrap and its tools, on top of sessions."""
