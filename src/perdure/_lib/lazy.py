"""Imports on first use: a package's public names (PEP 562), and extras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, home_of: Mapping[str, str], *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: Its name.
        home_of: The module of each public name.
        others: Public names that the package defines itself.

    """

    def get(name: str) -> Any:
        module = home_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*home_of, *others})


def import_extra(module: str, *, used_by: str, name: str, extra: str) -> Any:
    """Return a module of a package that an extra brings.

    Args:
        module: Its dotted name.
        used_by: What needs it, for the error.
        name: The package, as people call it.
        extra: The extra's name.

    Raises:
        MissingExtraError: The package is not installed.

    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the package itself lacks something
            raise
        from perdure.errors import MissingExtraError

        raise MissingExtraError(
            f"{used_by} needs {name}: pip install 'perdure[{extra}]'", extra=extra
        ) from error
