"""Keys that no provider knows: models are made with them, and nobody is asked."""

import os

os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = "not-a-key"


async def after():
    assert local is not thinker
    assert (await agent).id == "ada"
