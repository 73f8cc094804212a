"""The page's own persistence.yaml, in the folder of the agent."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "persistence.md"
text = PAGE.read_text(encoding="utf-8")
(block,) = [
    one
    for one in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if "zep_" in one
]
Path("persistence.yaml").write_text(block, encoding="utf-8")


async def after():
    from perdure.agent import EchoModel

    async with Gus.create("gus", model=EchoModel(), agent_dir=".") as gus:
        assert gus.config.get("user_name") == "Captain"
        assert gus.config.get("zep_user_id")
