"""Sessions of the OpenAI Agents SDK's own databases, to be imported into `PerdureSession`.

Read with the SDK's `SQLiteSession`, `AdvancedSQLiteSession` or `SQLAlchemySession`.
"""

from __future__ import annotations

import json
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from perdure.adapters.imports import (
    PAGE,
    Moved,
    ReadRows,
    Source,
    diverged,
    engine_rows,
    not_equal,
    read_only_engine,
    reader,
    reading,
    sqlite_copy,
    sqlite_path,
    sqlite_rows,
)
from perdure.adapters.openai_agents import PerdureSession
from perdure.errors import ConfigError, CorruptRecordError
from perdure.session.manager import SessionManager

TABLES: Final = ("agent_sessions", "agent_messages")
"""The SDK's default names of its tables: of sessions, and of their items."""
BRANCHES: Final = ("message_structure", "turn_usage")
"""Further tables of `AdvancedSQLiteSession`."""
IDS: Final = (
    "SELECT session_id FROM {tables[0]} {where} UNION SELECT session_id FROM {tables[1]} {where}"
)
"""Also of items whose session has no row."""
ROWS: Final = "SELECT count(*) FROM {tables[1]} WHERE session_id = ?"
IS_MAIN: Final = (
    " AND (id NOT IN (SELECT message_id FROM message_structure) OR id IN "
    "(SELECT message_id FROM message_structure WHERE branch_id = 'main'))"
)
"""Which rows `AdvancedSQLiteSession` has to return."""
STRUCTURED: Final = "SELECT 1 FROM message_structure WHERE session_id = ? LIMIT 1"

ReadItems = Callable[[str], Awaitable[list[Any]]]


@asynccontextmanager
async def source_of(
    url: str, *, tables: Sequence[str] = TABLES
) -> AsyncGenerator[OpenAISource, None]:
    """Open a database of the SDK's, to be read.

    Args:
        url: Where it is.
        tables: The ``sessions_table`` and the ``messages_table`` that its sessions were given.

    Raises:
        StoreUnavailableError: It cannot be read.
        ConfigError: It is not the SDK's database, or these are no names of two tables.

    """
    if len(tables) != len(TABLES) or not all(map(re.compile(r"\w+").fullmatch, tables)):
        message = f"invalid tables {','.join(tables)!r}: give two, such as {','.join(TABLES)}"
        raise ConfigError(message, option="tables")
    named = dict(zip(("sessions_table", "messages_table"), tables, strict=True))
    path = sqlite_path(url)
    if path is not None:
        async with sqlite_copy(path, *tables, more=BRANCHES) as copy:
            yield await _sqlite_source(copy, tables, named)
        return
    async with read_only_engine(url, "openai-agents[sqlalchemy]", *tables) as engine:
        module = reader("agents.extensions.memory.sqlalchemy_session", "openai-agents[sqlalchemy]")

        async def items(id_: str) -> list[Any]:
            session = module.SQLAlchemySession(id_, engine=engine, **named)
            return list(await session.get_items())

        rows = partial(engine_rows, engine)
        yield OpenAISource(await _total(rows, tables), items, rows, tables)


async def _sqlite_source(
    copy: Path, tables: Sequence[str], named: Mapping[str, str]
) -> OpenAISource:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'message_structure'"
    has_branches = bool(await sqlite_rows(copy, query))

    plain = reader("agents.memory.sqlite_session", "openai-agents").SQLiteSession
    branched: Any = None
    if has_branches:
        module = reader("agents.extensions.memory.advanced_sqlite_session", "openai-agents")
        branched = module.AdvancedSQLiteSession

    async def items(id_: str) -> list[Any]:
        is_branched = has_branches and await sqlite_rows(copy, STRUCTURED, id_)
        open_session = branched if is_branched else plain
        session = open_session(session_id=id_, db_path=copy, **named)
        try:
            return list(await session.get_items())
        finally:
            session.close()

    rows = partial(sqlite_rows, copy)
    main = IS_MAIN if has_branches else ""
    return OpenAISource(await _total(rows, tables), items, rows, tables, main)


async def _total(rows: ReadRows, tables: Sequence[str]) -> int:
    ids = IDS.format(tables=tables, where="")
    ((total,),) = await rows(f"SELECT count(*) FROM ({ids}) ids")  # noqa: S608  # names of tables
    return int(total)


@final
class OpenAISource(Source):
    """The sessions of a database of the SDK's."""

    def __init__(
        self,
        total: int,
        items: ReadItems,
        rows: ReadRows,
        tables: Sequence[str],
        is_main: str = "",
    ) -> None:
        self.total: int = total
        self._items = items
        self._rows = rows
        self._tables = tables
        self._count = ROWS.format(tables=tables) + is_main

    async def names(self) -> AsyncIterator[str]:
        """Return the sessions' ids."""
        where, after = "", list[str]()
        while page := await self._rows(
            f"{IDS.format(tables=self._tables, where=where)} ORDER BY session_id LIMIT {PAGE}",
            *after,
        ):
            for (id_,) in page:
                yield id_
            where, after = "WHERE session_id > ?", [id_, id_]

    async def move(self, name: str, sessions: SessionManager, tenant: str) -> Moved:
        """Add the items that the store lacks, and compare all of them."""
        with reading(f"session {name}"):
            ((count,),) = await self._rows(self._count, name)
            items = await self._items(name)
        if len(items) < count:  # it skips them
            message = f"{count - len(items)} of its {count} rows are not read by the SDK: "
            raise CorruptRecordError(message + "repair or delete them, and import again", key=name)

        def target() -> PerdureSession:
            # Saved when it is closed; what autosave has saved before is a beginning.
            return PerdureSession(name, sessions, tenant=tenant, durable=False)

        stored = await target().get_items()
        known, wanted = _texts(stored), _texts(items)
        if known[: len(wanted)] == wanted:
            return Moved(len(known), 0)  # it may have gone on here
        if wanted[: len(known)] != known:
            raise diverged(name, "its items are not how the source's begin")
        async with target() as session:
            for run in _runs(items[len(known) :]):
                await session.add_items(run)
        if _texts(await target().get_items()) != wanted:
            raise not_equal(name, "an item")
        return Moved(len(known), len(wanted) - len(known))


def _texts(items: Sequence[Any]) -> list[str]:
    """Return items so that equal ones are equal: a field's place does not count."""
    return [json.dumps(item, sort_keys=True) for item in items]


def _runs(items: Sequence[Any]) -> list[list[Any]]:
    """Return items in runs, each from a user's message on: they become turns."""
    runs: list[list[Any]] = []
    for item in items:
        if not runs or (isinstance(item, dict) and item.get("role") == "user"):
            runs.append([])
        runs[-1].append(item)
    return runs
