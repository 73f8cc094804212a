"""Imports on first use: a package's public names (PEP 562), and extras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perdure._lib.designs import pointer


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
            message = pointer(name)
            # Of an AttributeError, ``from perdure import …`` does not show the message.
            asks = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001
            if message and asks == "importlib._bootstrap":
                raise ImportError(f"cannot import name {name!r} from {package!r}{message}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}{message}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*home_of, *others})


@contextmanager
def from_extra(*modules: str, used_by: str, name: str, extra: str) -> Iterator[None]:
    """Import, in the block, from packages that an extra brings.

    Args:
        modules: Their dotted names.
        used_by: What needs it, for the error.
        name: The package that the extra is for, as people call it.
        extra: The extra's name.

    Raises:
        MissingExtraError: One of them is not installed, or is too old.

    """
    try:
        yield
    except ImportError as error:
        missing, dotted = f"{error.name}.", [f"{module}." for module in modules]
        if not any(each.startswith(missing) or missing.startswith(each) for each in dotted):
            raise  # a package itself lacks something
        from perdure.errors import MissingExtraError

        is_old = not isinstance(error, ModuleNotFoundError)
        what = f"a newer {name} ({error})" if is_old else name
        raise MissingExtraError(
            f"{used_by} needs {what}: pip install 'perdure[{extra}]'", extra=extra
        ) from error


def import_extra(module: str, *, used_by: str, name: str, extra: str) -> Any:
    """Return a module of a package that an extra brings; see `from_extra`."""
    with from_extra(module, used_by=used_by, name=name, extra=extra):
        return importlib.import_module(module)
