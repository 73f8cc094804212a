"""The backends, each behind the port in `perdure.store`.

`StateStore` makes one of a storage of your own that keeps whole states.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.interchange.storage import StateStorage as StateStorage
    from perdure.stores.state import StateStore as StateStore

_HOME_OF = {
    "StateStorage": "perdure.interchange.storage",
    "StateStore": "perdure.stores.state",
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'perdure.stores' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
