"""Examples of docstrings as code, on the site: griffe takes `>>>` in a text for quotations."""

from __future__ import annotations

import re

from griffe import Extension, Object

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(Extension):
    """Fences examples that stand in the text."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        """Change a docstring before it is read."""
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = fenced
