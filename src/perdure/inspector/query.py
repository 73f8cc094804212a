"""The parameters of a page's address, and its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from perdure.errors import InvalidArgumentError
from perdure.records.keys import DEFAULT_SESSION, SessionKey

Page = dict[str, Any]
"""The content of a page, which its template shows, and which is its JSON."""


@final
class Query:
    """The parameters of a request: the state of a page, all of it in its URL."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = params

    def text(self, name: str) -> str:
        """Return a parameter, "" if it is not given."""
        return self._params.get(name, "")

    def number(self, name: str) -> int | None:
        """Return a parameter as a number, None if it is not given.

        Raises:
            InvalidArgumentError: It is no number.

        """
        value = self.text(name)
        if not value:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 18):
            raise InvalidArgumentError(f"invalid {name}={value!r}: give a number", option=name)
        return int(value)

    def decimal(self, name: str) -> float:
        """Return a parameter as a number, 0 if it is not given.

        Raises:
            InvalidArgumentError: It is no number.

        """
        try:
            return float(self.text(name) or 0)
        except ValueError:
            raise InvalidArgumentError(
                f"invalid {name}={self.text(name)!r}: give a number", option=name
            ) from None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return a parameter that is one of several; the first one if it is not given.

        Raises:
            InvalidArgumentError: It is none of them.

        """
        value = self.text(name) or choices[0]
        if value not in choices:
            named = ", ".join(choice for choice in choices if choice)
            raise InvalidArgumentError(f"invalid {name}={value!r}: choose {named}", option=name)
        return value

    def key(self) -> SessionKey:
        """Return the session that a page is about.

        Raises:
            InvalidArgumentError: A part of it is no id.

        """
        session = self.text("session") or DEFAULT_SESSION
        return SessionKey(self.text("agent"), session, self.text("tenant"))
