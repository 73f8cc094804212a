"""Base of groups of options, which refuses an unknown name with the closest known one."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec


def meant(name: str, known: Sequence[str]) -> str:
    """Return a question with the known name that is closest to an unknown one; empty for none.

    >>> meant("keep_turn", ["keep_days", "keep_turns"])
    "did you mean 'keep_turns'?"
    """
    near = get_close_matches(name[:60], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


class _OptionsMeta(msgspec.StructMeta):
    if not TYPE_CHECKING:  # checkers know the options of each group by its fields

        def __call__(self, *args: Any, **given: Any) -> Any:
            known: tuple[str, ...] = self.__struct_fields__
            for name in given:
                if name not in known:
                    question = meant(name, known)
                    end = f": {question}" if question else "."
                    raise TypeError(
                        f"{self.__name__}() has no option {name!r}{end} It has {', '.join(known)}"
                    )
            return super().__call__(*args, **given)


class Options(msgspec.Struct, metaclass=_OptionsMeta, frozen=True, kw_only=True):
    """Base of groups of options."""
