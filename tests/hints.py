"""The types in signatures, read as a checker reads them: what only it imports, too."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


@cache
def namespace(module: str) -> dict[str, Any]:
    """Return a module's names, with those that it imports for checkers alone."""
    loaded = importlib.import_module(module)
    names = dict(vars(loaded))
    for block in ast.parse(inspect.getsource(loaded)).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for one in ast.walk(block):
                if isinstance(one, ast.ImportFrom) and one.module and one.names[0].name != "*":
                    home = importlib.import_module(one.module)
                    names |= {as_.asname or as_.name: getattr(home, as_.name) for as_ in one.names}
    return names


def of_function(function: Any) -> dict[str, Any]:
    """Return the types of a function's parameters and of what it returns."""
    function = inspect.unwrap(function)
    return typing.get_type_hints(function, globalns=namespace(function.__module__))


def of_fields(cls: type) -> dict[str, Any]:
    """Return the types of a class's public fields."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("perdure"):
            names, local = namespace(base.__module__), {base.__name__: base}
            for name, hint in inspect.get_annotations(base).items():
                if not name.startswith("_"):
                    found[name] = eval(hint, names, local) if isinstance(hint, str) else hint
    return found


def of_member(cls: type, name: str) -> dict[str, Any]:
    """Return the types that a method or a property of a class has."""
    value = inspect.getattr_static(cls, name)
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    ours = inspect.isfunction(function) and function.__module__.startswith("perdure")
    return of_function(function) if ours else {}


def classes(hint: Any) -> Iterator[type]:
    """Give perdure's own classes in a type, wherever in it they are."""
    if isinstance(hint, type) and hint.__module__.split(".")[0] == "perdure":
        yield hint
    if isinstance(hint, list):
        for one in hint:
            yield from classes(one)
    if typing.get_origin(hint) is not typing.Literal:
        for one in typing.get_args(hint):
            yield from classes(one)


def of_public(value: Any, members: Callable[[type], list[str]]) -> Iterator[tuple[str, Any]]:
    """Give each type in the signatures of a public name, with the member that has it."""
    if isinstance(value, type):
        yield from ((name, hint) for name, hint in of_fields(value).items())
        made = [] if hasattr(value, "__struct_fields__") else ["__init__"]
        for name in (*made, *members(value)):
            if name in of_fields(value) or not hasattr(value, name):
                continue
            for parameter, hint in of_member(value, name).items():
                if parameter != "self":
                    yield name, hint
    elif inspect.isroutine(value) and value.__module__.startswith("perdure"):
        yield from (("", hint) for hint in of_function(value).values())
