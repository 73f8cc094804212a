"""Options, of groups and of functions, which refuse an unknown name with the closest known one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

F = TypeVar("F", bound=Callable[..., Any])


def meant(name: str, known: Sequence[str], *, cutoff: float = 0.5) -> str:
    """Return a question with the known name that is closest to an unknown one; empty for none.

    A higher *cutoff* wants more of the name, where another word is no slip.

    >>> meant("keep_turn", ["keep_days", "keep_turns"])
    "did you mean 'keep_turns'?"
    """
    near = get_close_matches(name[:60], known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def refuse_unknown(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise for the first name that is not known.

    Raises:
        TypeError: There is one.

    """
    for name in given:
        if name not in known:
            question = meant(name, known)
            end = f": {question}" if question else "."
            raise TypeError(f"{owner}() has no option {name!r}{end} It has {', '.join(known)}")


def names_options(function: F) -> F:
    """Let a function with keyword arguments refuse an unknown one with the closest known one.

    It costs a call: not for what is called with each message.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = tuple(name for name in names if name != "self")

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        refuse_unknown(function.__name__, given, known)
        return function(*args, **given)

    return cast("F", checked)


class _OptionsMeta(msgspec.StructMeta):
    if not TYPE_CHECKING:  # checkers know the options of each group by its fields

        def __call__(self, *args: Any, **given: Any) -> Any:
            refuse_unknown(self.__name__, given, self.__struct_fields__)
            return super().__call__(*args, **given)


class Options(msgspec.Struct, metaclass=_OptionsMeta, frozen=True, kw_only=True):
    """Base of groups of options."""
