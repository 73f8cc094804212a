"""Names that people try and a class does not have, with errors that say what to write instead."""

from __future__ import annotations

from typing import Any, final


@final
class Misnamed:
    """An attribute that is not there: ``close = Misnamed("await sessions.aclose()")``.

    Define it behind ``if not TYPE_CHECKING``: a checker has to find the mistake as well.
    """

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        message = f"{owner.__name__} has no {self.name!r}: write `{self.instead}`"
        # Without the object, Python does not add a private name that is similar.
        raise AttributeError(message, name=self.name, obj=None)


def async_only(call: str) -> TypeError:
    """Return the error for a ``with`` where an ``async with`` is needed."""
    return TypeError(f"write `async with {call}`; `with` is for perdure.sync, which is blocking")
