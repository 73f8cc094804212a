"""The public API as text: each public name with its signature, one a line.

Public is the ``__all__`` of ``perdure`` and of each of its packages and modules one level
down that has no underscore and has an ``__all__``; what lies deeper is internal, and
what a person needs of it is named there too. `tests/api.txt` holds what was reviewed.

``python -m tests.public_api`` compares, ``python -m tests.public_api --update`` accepts.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from perdure import MissingExtraError
from perdure._lib.misnamed import Misnamed
from tests.source_tree import ROOT, modules

SNAPSHOT = ROOT / "tests" / "api.txt"
PROTOCOLS = (
    "__aenter__",
    "__aexit__",
    "__aiter__",
    "__anext__",
    "__await__",
    "__call__",
    "__enter__",
    "__exit__",
    "__iter__",
    "__len__",
)
"""The special methods that people use by syntax."""


@cache
def public_modules() -> list[ModuleType]:
    names = [name for name in modules() if name.count(".") <= 1 and "._" not in name]
    found = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    return [module for module in found if hasattr(module, "__all__")]


def render() -> str:
    """Return the whole public API, sorted, in a form that all supported Pythons agree on."""
    lines = [
        line
        for module in public_modules()
        for name in sorted(module.__all__)
        for line in described(module, name)
    ]
    return "".join(f"{line}\n" for line in lines)


def described(module: ModuleType, name: str) -> list[str]:
    """Return the lines of a public name; the reviewed ones where its SDK is not installed."""
    path = f"{module.__name__}.{name}"
    try:
        return [*describe(path, getattr(module, name))]
    except MissingExtraError:
        reviewed = SNAPSHOT.read_text(encoding="utf-8").splitlines()
        return [line for line in reviewed if re.match(rf"{re.escape(path)}\b", line)]


def describe(path: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        yield from describe_class(path, value)
    elif callable(value):
        yield f"{path}{signature(value)}"
    elif isinstance(value, ModuleType):
        yield f"{path}: module"
    else:
        yield f"{path}: {type(value).__name__}"


def describe_class(path: str, cls: type) -> Iterator[str]:
    home = cls.__module__
    if f"{home}.{cls.__name__}" != path and is_public(home, cls.__name__):
        # Described once, where it is at home.
        yield f"{path} = {home}.{cls.__name__}"
        return
    bases = ", ".join(plain(base.__name__) for base in cls.__bases__ if base is not object)
    yield f"{path}: class({bases})"
    if issubclass(cls, enum.Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in cls)
        return
    if has_own_constructor(cls):
        yield f"{path}{signature(cls)}"
    for name in public_members(cls):
        yield from describe_member(f"{path}.{name}", cls, name)


def is_public(module: str, name: str) -> bool:
    return any(name in found.__all__ for found in public_modules() if found.__name__ == module)


def has_own_constructor(cls: type) -> bool:
    """Whether people make it, and not just as its base class is made."""
    inherited = "__init__" not in vars(cls) and cls.__bases__[0].__module__.startswith("perdure")
    is_struct = hasattr(cls, "__struct_fields__")
    return not getattr(cls, "_is_protocol", False) and (is_struct or not inherited)


def public_members(cls: type) -> list[str]:
    """Return the names that perdure's own classes define, inherited ones included."""
    fields = set(getattr(cls, "__struct_fields__", ()))
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "perdure"]
    names = {name for base in own for name in (*vars(base), *annotations(base))}
    return sorted(
        name
        for name in names - fields
        if not name.startswith("_") or (name in PROTOCOLS and defines(own, name))
    )


def defines(classes: list[type], name: str) -> bool:
    return any(name in vars(cls) for cls in classes)


def annotations(cls: type) -> dict[str, object]:
    return dict(vars(cls).get("__annotations__", {}))


def describe_member(path: str, cls: type, name: str) -> Iterator[str]:
    value = inspect.getattr_static(cls, name, None)
    if isinstance(value, Misnamed):  # it is not there
        return
    if isinstance(value, property):
        returns = inspect.signature(value.fget).return_annotation if value.fget else ""
        yield f"{path}: property {annotation(returns)}"
    elif isinstance(value, classmethod | staticmethod):
        yield f"{path}{signature(getattr(cls, name))} {type(value).__name__}"
    elif inspect.isfunction(value):
        yield f"{path}{signature(value)}"
    else:
        declared = next((a[name] for a in map(annotations, cls.__mro__) if name in a), None)
        yield f"{path}: attribute" + (f" {annotation(declared)}" if declared else "")


def signature(function: object) -> str:
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    parameters, separated = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            separated = True
        if parameter.kind is parameter.KEYWORD_ONLY and not separated:
            parameters.append("*")
            separated = True
        parameters.append(described_parameter(parameter))
    returns = found.return_annotation
    arrow = "" if returns is found.empty else f" -> {annotation(returns)}"
    awaited = " async" if inspect.iscoroutinefunction(function) else ""
    return f"({', '.join(parameters)}){awaited}{arrow}"


def described_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {default(parameter.default)}"
    return text


def default(value: object) -> str:
    if isinstance(value, str):
        return repr(value)
    shown = repr(value)
    # A name in angle brackets would tell where in memory it lies.
    return "..." if "<" in shown else plain(shown)


def annotation(value: object) -> str:
    return plain(value if isinstance(value, str) else inspect.formatannotation(value))


def plain(text: str) -> str:
    """Drop the modules in front of names, which the same annotation may or may not carry."""
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def difference() -> str:
    """Return how the API differs from the snapshot, as a unified diff; empty if it does not."""
    reviewed = SNAPSHOT.read_text(encoding="utf-8") if SNAPSHOT.exists() else ""
    lines = difflib.unified_diff(
        reviewed.splitlines(keepends=True),
        render().splitlines(keepends=True),
        "tests/api.txt",
        "now",
        n=0,
    )
    return "".join(lines)


def main() -> int:
    if "--update" in sys.argv[1:]:
        SNAPSHOT.write_text(render(), encoding="utf-8")
        return 0
    found = difference()
    if found:
        print(found)
        print("The public API changed. If it should: nox -s api, and say so in CHANGELOG.md.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
