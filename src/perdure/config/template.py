"""Templates of initial values: text with ``{{ variables }}`` of four names, and no engine.

Pure: what a variable becomes is the caller's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from perdure.errors import TemplateError

VARIABLES: Final = ("agent_name", "random_id", "timestamp", "uuid")
"""What a template may name."""


_VARIABLE: Final = re.compile(r"\{\{([^{}]*)\}\}")


def check(text: str) -> None:
    """Refuse a template that could not be evaluated.

    Raises:
        TemplateError: A variable is unknown, or does not end.

    """
    for name in names_in(text):
        if name not in VARIABLES:
            known = ", ".join(VARIABLES)
            message = f"the template names {name[:60]!r}, which is no variable: choose from {known}"
            raise TemplateError(message, variable=name[:60])
    if "{{" in _VARIABLE.sub("", text):
        message = "the template has a {{ without its }}, or braces in between: close it"
        raise TemplateError(message)


def names_in(text: str) -> list[str]:
    """Return the variables that a template names, in their order.

    >>> names_in("{{ agent_name }}::{{random_id}}")
    ['agent_name', 'random_id']
    """
    return [match[1].strip() for match in _VARIABLE.finditer(text)]


def evaluate(text: str, variables: Mapping[str, Callable[[], str]]) -> str:
    """Return a template's text; each occurrence of a variable is made once, by itself.

    >>> evaluate("{{ agent_name }}!", {"agent_name": lambda: "gus"})
    'gus!'
    """
    return _VARIABLE.sub(lambda match: variables[match[1].strip()](), text)
