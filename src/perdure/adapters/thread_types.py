"""Names of the classes that a LangGraph thread's values are of, read without LangGraph.

Pure: nothing is imported, called or rebuilt.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from perdure.adapters.thread_log import JOINED, Items, Leaf, read_record
from perdure.records.records import Record

NAMED: Final = frozenset(range(6))
"""Codes of LangGraph's msgpack extensions that begin with a module and a name."""
METHOD: Final = 3
"""That of a class's method, whose name follows the argument."""
SNAPSHOT: Final = 7
"""That of a value which a channel is rebuilt from."""


def classes_of(record: Record) -> set[str]:
    """Return the dotted names of the classes in a record, and what else is no plain data."""
    stored = read_record(record)
    return set() if stored is None else {name for each in stored.values for name in _names(each)}


def _names(value: Leaf | Items) -> Iterator[str]:
    if isinstance(value, Items):
        if value.kind.startswith(JOINED):
            yield "a value of more than 4 MiB, which was not looked into"
    elif value.kind == "msgpack":
        yield from _in_msgpack(b64decode(value.data))
    elif value.kind == "json":
        yield from _in_json(msgspec.json.decode(b64decode(value.data)))
    elif value.kind not in ("null", "bytes", "bytearray", "part"):
        yield f"a value stored as {value.kind}"


def _in_msgpack(data: bytes) -> set[str]:
    names: set[str] = set()

    def look(code: int, data: memoryview) -> Any:
        if code in NAMED:
            inside = msgspec.msgpack.decode(data, ext_hook=look)
            parts = (*inside[:2], inside[3]) if code == METHOD else inside[:2]
            names.add(".".join(map(str, parts)))
        elif code == SNAPSHOT:
            msgspec.msgpack.decode(data, ext_hook=look)
        return None

    msgspec.msgpack.decode(data, ext_hook=look)
    return names


def _in_json(value: Any) -> Iterator[str]:
    """Yield the classes of LangChain's own JSON, in which LangGraph stored until 2024."""
    inside: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = value.values()
        if value.get("type") == "constructor" and isinstance(value.get("id"), list):
            yield ".".join(map(str, value["id"]))
    for item in inside:
        yield from _in_json(item)
