"""``perdure types``: the classes that a program has to name, to read what is stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.progress import MofNCompleteColumn

from perdure.adapters.thread_log import classes_of
from perdure.cli.access import opened
from perdure.cli.check import listed_sessions
from perdure.cli.output import Answer, print_json, print_table, progress_bar, say
from perdure.errors import MissingExtraError
from perdure.records.records import FOREIGN, Record
from perdure.records.types import KIND_PREFIX
from perdure.records.values import parse_label
from perdure.store import Store

LABEL = re.compile(rb'":"x:[^"]+@\d+"')
"""The label in a record that names a registered type."""


async def types(
    store: Annotated[str | None, Parameter(name="STORE")] = None,
    /,
    *,
    tenant: str = "",
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """List the classes of stored values that a program has to name, to read them.

    Nothing is imported or rebuilt: a name that is stored is only shown. Types that are registered
    with ``connect(types=[…])`` go by their tags, and classes in LangGraph's threads by their
    dotted names, for ``PerdureSaver(types=[…])``. Reads every log.

    Args:
        store: The store: a path or a URL. Default: PERDURE_URL, else PERDURE_HOME, else the user's
            folder.
        tenant: Only this tenant's sessions. Default: all.

    """
    async with opened(store) as source:
        found = await _found(source, tenant)
    if answer.json:
        print_json({"location": source.location, "types": found})
    elif not found:
        say(f"all that is stored in {source.location} is plain data")
    else:
        columns = ("type", "of", "sessions", "for example")
        print_table(columns, (map(str, each.values()) for each in found), right="sessions")
    return 0


async def _found(store: Store, tenant: str) -> list[dict[str, Any]]:
    """Return the classes, whose they are, and how many sessions have such values, with an example.

    Whose: perdure's, by its tag, or an SDK's, by its dotted name.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    _, keys = await listed_sessions(store, tenant)
    safe = _safe()
    with progress_bar("reading", MofNCompleteColumn(), total=len(keys)) as update:
        for done, key in enumerate(keys, 1):
            names: set[tuple[str, str]] = set()
            async with aclosing(store.read_log(key)) as log:
                async for chunk in log:
                    for record in chunk.records:
                        names.update(_names(record))
            for of, name in sorted(names):
                if name not in safe:
                    new = {"type": name, "of": of, "sessions": 0, "example": key}
                    found.setdefault((of, name), new)["sessions"] += 1
            update(done, len(keys))
    return [found[name] for name in sorted(found)]


def _names(record: Record) -> Iterator[tuple[str, str]]:
    """Yield whose classes a record has values of, and their names."""
    if record.kind == FOREIGN:
        yield from (("langgraph", name) for name in classes_of(record))
        return
    if record.kind.startswith(KIND_PREFIX):
        yield "perdure", record.kind.removeprefix(KIND_PREFIX)
    if LABEL.search(record.payload):
        yield from (("perdure", tag) for tag in _tags(msgspec.json.decode(record.payload)))


def _tags(value: Any) -> Iterator[str]:
    """Yield the tags in the tables that say which values are of a registered type."""
    inside: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = value.values()
        for name, table in value.items():
            if name.endswith("types") and isinstance(table, dict):
                labels = [parse_label(each) for each in table.values() if isinstance(each, str)]
                yield from (tag for tag, version in labels if version)
    for item in inside:
        yield from _tags(item)


def _safe() -> set[str]:
    """Return the dotted names of the classes that LangGraph itself always reads."""
    with suppress(MissingExtraError):
        from perdure.adapters.thread_types import ALWAYS_READ

        return {".".join(names) for names in ALWAYS_READ}
    return set()
