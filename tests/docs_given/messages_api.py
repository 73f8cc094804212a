"""A server on this machine plays the model that the SDK's program asks."""

import os

from tests.servers.anthropic_script import AnthropicScript

server = AnthropicScript()
server.__enter__()
os.environ.update(server.environment)
os.environ["CLAUDE_CONFIG_DIR"] = os.path.abspath("config")
