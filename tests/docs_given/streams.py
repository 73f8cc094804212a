"""A server that speaks the protocols of the providers, and the variables by which their SDKs find it."""

import os
from pathlib import Path

from tests.servers.models import KEY, running

os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # for the process of the server
serving = running()
server = serving.__enter__()
os.environ |= {
    "OPENAI_BASE_URL": server.openai_url,
    "OPENAI_API_KEY": KEY,
    "ANTHROPIC_BASE_URL": server.url,
    "ANTHROPIC_API_KEY": KEY,
    "GOOGLE_GEMINI_BASE_URL": server.url,
    "GEMINI_API_KEY": KEY,
}


async def after():
    serving.__exit__(None, None, None)
