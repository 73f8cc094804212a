r"""JSON of SDKs' models with all that Python's own JSON takes: NaN, infinities, lone surrogates.

A model may answer with half of an emoji, and a tool with NaN. Pydantic refuses the one and makes
null of the other. Here they are written as Python's `json` writes them, ``"\ud83d"`` and ``NaN``,
so that they come back as they were. Anything else has the bytes that pydantic writes. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from perdure.records.json import MAX_DEPTH, step

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

Mode = Literal["python", "json"]


def dumped(model: Any, as_bytes: Callable[[], bytes], as_values: Callable[[Mode], Any]) -> bytes:
    """Return a model as JSON.

    Args:
        model: The model, or what holds some.
        as_bytes: Pydantic's dump of it as JSON.
        as_values: Pydantic's dump of it as values, for which ``"json"`` is as JSON has them.

    Raises:
        ValueError: It holds something that is not JSON.

    """
    try:
        data = as_bytes()
    except ValueError:
        plain = as_values("json")
        if not _has_surrogates(plain):
            raise
    else:
        if b"null" not in data or _is_finite(model):
            return data
        plain = as_values("json")
    return _text(_with_numbers(plain, as_values("python")))


def loaded(data: bytes, of_bytes: Callable[[bytes], T], of_values: Callable[[Any], T]) -> T:
    """Return the model of JSON that `dumped` has written.

    Args:
        data: The JSON.
        of_bytes: Pydantic's reader of JSON,
        of_values: and of values.

    Raises:
        ValueError: It is none.

    """
    try:
        return of_bytes(data)
    except ValueError:
        if rb"\ud" not in data:
            raise
        return of_values(json.loads(data))


def dumped_by(adapter: TypeAdapter[T], value: T) -> bytes:
    """Return what `dumped` makes of a value, by pydantic's adapter of its type."""
    return dumped(
        value, lambda: adapter.dump_json(value), lambda mode: adapter.dump_python(value, mode=mode)
    )


def loaded_by(adapter: TypeAdapter[T], data: bytes) -> T:
    """Return the value of JSON that `dumped_by` has written.

    Raises:
        ValueError: It is none.

    """
    return loaded(data, adapter.validate_json, adapter.validate_python)


def shown(data: bytes) -> Any:
    r"""Return what `dumped` has written as values that any JSON can express.

    >>> shown(rb'{"half":"\ud83d","number":NaN}')
    {'half': '?', 'number': None}
    """
    values = json.loads(data, parse_constant=lambda _: None)
    if rb"\ud" not in data:
        return values
    return json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))


def as_value(data: bytes) -> bytes:
    r"""Return what `dumped` has written as a JSON value: as text, where it is not valid JSON.

    >>> as_value(b'{"a":1}'), as_value(b'{"a":NaN}')
    (b'{"a":1}', b'"{\\"a\\":NaN}"')
    """
    if rb"\ud" in data or b"NaN" in data or b"Infinity" in data:
        try:
            msgspec.json.decode(data)
        except ValueError:
            return msgspec.json.encode(data.decode())
    return data


def of_value(value: bytes) -> bytes:
    """Return an object's or a list's JSON of what `as_value` has returned."""
    return msgspec.json.decode(value, type=str).encode() if value[:1] == b'"' else value


def is_exact(value: Any) -> bool:
    """Return whether JSON expresses a value that is of JSON's own types."""
    return _is_finite(value) and not _has_surrogates(value)


def not_json_at(value: Any, at: str) -> tuple[str, Any]:
    """Return the innermost part of a model that pydantic cannot dump, and its place."""
    from pydantic_core import to_json

    def is_refused(part: Any) -> bool:
        try:
            to_json(part, bytes_mode="base64", inf_nan_mode="constants")
        except (ValueError, RecursionError) as error:
            return "surrogates" not in str(error)
        return False

    return refused_part(value, is_refused, at)


def refused_part(value: Any, refused: Callable[[Any], bool], at: str) -> tuple[str, Any]:
    """Return the innermost part of a value that is refused, and its place.

    >>> refused_part({"a": [1, {2}]}, lambda part: "{2}" in repr(part), "state")
    ('state.a[1]', {2})
    """
    for _ in range(MAX_DEPTH):
        if isinstance(value, dict):
            children = [(step(key), child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            children = [(f"[{index}]", child) for index, child in enumerate(value)]
        else:
            fields = getattr(value, "__dict__", None) or {}
            is_model = hasattr(type(value), "__pydantic_fields__") or is_dataclass(value)
            children = [(step(name), child) for name, child in fields.items()] if is_model else []
        inner = next(((name, child) for name, child in children if refused(child)), None)
        if inner is None:
            break
        at, value = at + inner[0], inner[1]
    return at, value


def _text(values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _has_surrogates(values: Any) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


_ATOMS = frozenset({str, int, bool, bytes, type(None)})


def _is_finite(value: Any) -> bool:
    """Whether a value, or a model, has no NaN or infinity."""
    rest = [value]
    while rest:
        value = rest.pop()
        if type(value) in _ATOMS:
            continue
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            rest.extend(value)
        elif isinstance(value, float):
            if not isfinite(value):
                return False
        else:
            for fields in ("__dict__", "__pydantic_extra__"):
                held = getattr(value, fields, None)
                if type(held) is dict:
                    rest.extend(held.values())
    return True


def _with_numbers(plain: Any, values: Any) -> Any:
    """Return values as JSON has them, with the numbers that became None."""
    if plain is None and isinstance(values, float):
        return values
    if isinstance(plain, dict) and isinstance(values, dict) and len(plain) == len(values):
        pairs = zip(plain.items(), values.values(), strict=True)
        return {key: _with_numbers(value, was) for (key, value), was in pairs}
    if isinstance(plain, list) and isinstance(values, list | tuple):
        return [_with_numbers(*pair) for pair in zip(plain, values, strict=True)]
    return plain
