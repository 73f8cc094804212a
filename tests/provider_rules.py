"""What providers accept, field by field, as the tables of docs/provider-fields.md.

``python -m tests.provider_rules`` compares, ``python -m tests.provider_rules --update`` writes.
"""

from __future__ import annotations

import sys

from perdure.providers.request_rules import RULES, Rule
from tests.source_tree import ROOT

PAGE = ROOT / "docs" / "provider-fields.md"
TITLES = {
    "openai": "Chat Completions",
    "openai-responses": "Responses",
    "anthropic": "Anthropic",
    "gemini": "Gemini",
}
_INTRODUCTION = """\
# Provider rules, field by field

Each table is a provider's rules, and each request that perdure renders keeps them; the same data is what the code reads, and what its tests judge
by. A field is written as its path: `messages[].name` is the name of each message. A list of parts in a message that you append is checked in the same
way as one that came with a history.
"""


def written() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for format, rules in RULES.items():
        parts.append(f"\n## {TITLES[format]}\n\n| field | accepted | otherwise |\n|---|---|---|\n")
        parts += map(_row, rules)
    return "".join(parts)


def _row(rule: Rule) -> str:
    if rule.fields == ("…",):
        return f"| any other field | | {rule.otherwise} |\n"
    paths = "<br>".join(f"`{path}`" for path in rule.fields).replace("|", "\\|")
    cells = (paths, rule.takes, rule.otherwise)
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    if "--update" in sys.argv[1:]:
        PAGE.write_text(written(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != written():
        print(f"{PAGE.name} is not what the rules say: python -m tests.provider_rules --update")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
