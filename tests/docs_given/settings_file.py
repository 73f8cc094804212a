"""The page's own persistence.yaml with settings, and a key where it says."""

import os
import re
from pathlib import Path

from perdure.stores import MasterKeys

PAGE = Path(__file__).parents[2] / "docs" / "persistence.md"
text = PAGE.read_text(encoding="utf-8")
(block,) = [
    one
    for one in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if "AGENTS_KEY" in one
]
Path("persistence.yaml").write_text(block, encoding="utf-8")
os.environ["AGENTS_KEY"] = MasterKeys.new()


async def after():
    async with sessions, sessions.open("ada"):
        assert Path("sessions").is_dir()
