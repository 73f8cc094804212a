"""The database as a whole: whether its pages and indexes are sound, and its indexes made anew.

Records and documents are verified whenever they are read: this is about what leads to them.
Blocking.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.model.keys import SessionKey
from perdure.stores.sqlite.connecting import connect, format_of, pragma
from perdure.stores.sqlite.rows import DELETED
from perdure.stores.sqlite.sql import Q
from perdure.stores.sqlite.trouble import driver_error, is_damage

if TYPE_CHECKING:
    import sqlite3

__all__ = ["problems", "readable_keys", "reindex"]

MOST = 100
"""Problems that are looked for: more of them say no more."""


def problems(con: sqlite3.Connection) -> list[str]:
    """Return what SQLite's own check of every page and index finds; nothing if all is sound."""
    try:
        found = [str(said) for (said,) in pragma(con, f"integrity_check({MOST})")]
    except driver_error() as error:
        if not is_damage(error):
            raise
        return [str(error)]
    return [] if found == ["ok"] else [line for said in found for line in said.splitlines()]


def reindex(path: str, timeout: float) -> list[str]:
    """Make all indexes anew from their tables, if that mends anything; return what is left."""
    con = connect(path, timeout=timeout)
    with contextlib.closing(con):
        format_of(con, path)
        con.execute("BEGIN IMMEDIATE")
        try:
            before = problems(con)
            if not before:
                return []
            left = _reindexed(con, before)
            con.execute("COMMIT" if len(left) < len(before) else "ROLLBACK")
        finally:
            if con.in_transaction:
                con.execute("ROLLBACK")
    return left


def _reindexed(con: sqlite3.Connection, before: list[str]) -> list[str]:
    try:
        con.execute("REINDEX")
    except driver_error() as error:  # a table is damaged, or has a row twice
        return [*before, f"REINDEX: {error}"]
    return problems(con)


def readable_keys(con: sqlite3.Connection) -> list[SessionKey]:
    """List the sessions whose rows can be read, past damaged pages and without any index."""
    found: set[SessionKey] = set()
    for query in ("keys_from_the_first", "keys_from_the_last"):
        try:
            for tenant, agent, session, epoch, state in con.execute(Q[query]):
                key = _key(tenant, agent, session)
                if key is not None and epoch and state != DELETED:
                    found.add(key)
        except driver_error() as error:
            if not is_damage(error):
                raise
    return sorted(found)


def _key(tenant: Any, agent: Any, session: Any) -> SessionKey | None:
    try:
        return msgspec.convert({"tenant": tenant, "agent": agent, "session": session}, SessionKey)
    except (ValueError, msgspec.MsgspecError):
        return None
