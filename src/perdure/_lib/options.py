"""Base of groups of options, which refuses an unknown name with the closest known one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec


class _OptionsMeta(msgspec.StructMeta):
    if not TYPE_CHECKING:  # checkers know the options of each group by its fields

        def __call__(self, *args: Any, **given: Any) -> Any:
            known: tuple[str, ...] = self.__struct_fields__
            for name in given:
                if name not in known:
                    near = get_close_matches(name[:60], known, n=1, cutoff=0.5)
                    meant = f": did you mean {near[0]!r}?" if near else "."
                    raise TypeError(
                        f"{self.__name__}() has no option {name!r}{meant} It has {', '.join(known)}"
                    )
            return super().__call__(*args, **given)


class Options(msgspec.Struct, metaclass=_OptionsMeta, frozen=True, kw_only=True):
    """Base of groups of options."""
