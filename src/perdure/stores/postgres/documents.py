"""Documents, manifests, blobs, and the directory of sessions. Blocking.

A fold is one transaction, and a read is one statement: no reader sees part of a fold. A manifest
carries a checksum, and one that fails it counts as lost: the log has all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.errors import (
    AcknowledgedRecordsLostError,
    CorruptRecordError,
    UnsupportedVersionError,
)
from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    Manifest,
    SessionQuery,
    require_logged,
)
from perdure.records.records import Record, open_sealed, seal
from perdure.records.rows import in_parts, stored_documents
from perdure.store import BlobSweep, Documents, RestoreData, SessionInfo
from perdure.stores.postgres.connections import Connection, Statement, bigint, execute_all, quoted
from perdure.stores.postgres.log import (
    PAGE_ROWS,
    SessionState,
    digest_of,
    label_values,
    lease_lost_error,
    named,
    records_after,
    require_held,
    state_of,
    tenant_id,
    without_nul,
)
from perdure.stores.postgres.schema import Statements


def read(
    connection: Connection,
    sql: Statements,
    wanted: Sequence[tuple[SessionKey, Collection[str] | None]],
) -> list[Documents | Exception]:
    """Read documents by their names, None for all; each is checked against the manifest's hash."""
    found = execute_all(
        connection,
        [(sql["documents"], {**named(key), "ids": _ids(names)}) for key, names in wanted],
    )
    return [
        _checked(key, names, max([row[0] for row in rows], default=0), rows)
        for (key, names), rows in zip(wanted, found, strict=True)
    ]


def read_many(
    connection: Connection,
    sql: Statements,
    keys: Sequence[SessionKey],
    names: Collection[str] | None,
) -> list[RestoreData | None]:
    """Read documents, and the logs after them; None for what has to be read by itself."""
    missing = RestoreData(Documents(), records=(), may_have_items=False)
    return [
        missing if state is None else opened(key, names, state, rows)
        for key, state, rows in _read_openings(connection, sql, keys, names)
    ]


def read_logs(
    connection: Connection, sql: Statements, keys: Sequence[SessionKey]
) -> list[tuple[Record, ...] | None]:
    """Read logs; None for what has to be read by itself."""
    return [
        () if state is None else records_after(key, state, 0, _commits(rows))
        for key, state, rows in _read_openings(connection, sql, keys, (), whole=True)
    ]


def _read_openings(
    connection: Connection,
    sql: Statements,
    keys: Sequence[SessionKey],
    names: Collection[str] | None,
    *,
    whole: bool = False,
) -> list[tuple[SessionKey, SessionState | None, list[tuple[Any, ...]]]]:
    """Return sessions with what restores need of them, None if missing, in one round trip."""
    opening = opening_query(sql, keys, names, max_bytes=_MANY_BYTES, whole=whole)
    seen, rows = execute_all(connection, [(sql["many_states"], _places(keys)), opening])
    states = {number: SessionState(*fields) for number, *fields in seen}
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return [(key, states.get(n), found.get(n, [])) for n, key in enumerate(keys, 1)]


_MANY_BYTES = 256 * 1024
"""Bytes of each log that are read together; a longer one is read by itself."""


def _places(keys: Sequence[SessionKey]) -> dict[str, object]:
    return {
        "tenants": [key.tenant for key in keys],
        "agents": [key.agent for key in keys],
        "sessions": [key.session for key in keys],
    }


def _ids(names: Collection[str] | None) -> list[bytes] | None:
    return None if names is None else [digest_of(name) for name in names]


def _checked(
    key: SessionKey, names: Collection[str] | None, head: int, rows: Iterable[tuple[Any, ...]]
) -> Documents | Exception:
    """Return the documents in rows, or why none of them can be used.

    The second column is a document's name, NULL for the manifest; the third is its bytes.
    """
    stored = {name and name.decode("utf-8", "replace"): data for _, name, data, *_ in rows}
    sealed = stored.pop(None, None)
    try:
        return stored_documents(
            key, head, sealed, stored, names, place=lambda: "the table manifests"
        )
    except (CorruptRecordError, UnsupportedVersionError) as error:
        return error


# What a restore needs, read after the take of a session


_OPENING_BYTES = 1024 * 1024
"""Bytes of the log that an open reads; a longer one is read by pages."""


def opening_query(
    sql: Statements,
    keys: Sequence[SessionKey],
    names: Collection[str] | None,
    *,
    max_bytes: int = _OPENING_BYTES,
    whole: bool = False,
) -> Statement:
    """Return the query of what restores need, of one moment; *whole*: of the whole log alone."""
    limits = {"limit": bigint(PAGE_ROWS), "bytes": bigint(max_bytes)}
    return sql["opening"], {**_places(keys), "ids": _ids(names), "whole": whole, **limits}


def opened(
    key: SessionKey,
    names: Collection[str] | None,
    state: SessionState,
    rows: Sequence[tuple[Any, ...]],
) -> RestoreData | None:
    """Return what a restore needs; None if reading it by itself will say why it cannot be used."""
    others = [row for row in rows if row[3] is None]
    documents = _checked(key, names, state.head, [row for row in others if row[2] is not None])
    if isinstance(documents, Exception):
        return None
    after = documents.log_after
    records = None if after is None else records_after(key, state, after, _commits(rows))
    is_waiting = any(row[2] is None for row in others)
    return RestoreData(documents, after or 0, records, is_waiting)


def _commits(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*row[3:], row[2]) for row in rows if row[3] is not None]


class Fold(NamedTuple):
    """Documents and a manifest to write."""

    row_id: int
    """0: not known."""
    key: SessionKey
    documents: Mapping[str, bytes]
    manifest: Manifest


def write(connection: Connection, sql: Statements, folds: Sequence[Fold]) -> list[Exception | None]:
    """Replace documents and manifests, each session's in one statement."""
    # Rows are always locked in the order of their ids.
    order = sorted(range(len(folds)), key=lambda place: (folds[place].row_id, folds[place].key))
    found = execute_all(connection, [_fold(sql, folds[place]) for place in order])
    results: list[Exception | None] = [None] * len(folds)
    for place, rows in zip(order, found, strict=True):
        # Nothing was written: it is not held any more, or its log lacks what the manifest is as of.
        if not rows:
            key, epoch = folds[place].key, folds[place].manifest.epoch
            state = state_of(connection, sql, key)
            results[place] = lease_lost_error(key, epoch, state)
            if state is not None and state.epoch == epoch and not state.is_over:
                results[place] = _refusal(folds[place].manifest, state.head)
    return results


def _refusal(manifest: Manifest, head: int) -> Exception | None:
    try:
        require_logged(manifest, head)
    except AcknowledgedRecordsLostError as error:
        return error
    return None


def _fold(sql: Statements, fold: Fold) -> Statement:
    key, manifest = fold.key, fold.manifest
    listed = {name: digest_of(name) for name in manifest.documents}
    written = [name for name in fold.documents if name in listed]
    values = {
        "tenant": key.tenant,
        "agent": key.agent,
        "session": key.session,
        "epoch": bigint(manifest.epoch),
        "as_of": bigint(manifest.as_of_seq),
        "ids": [listed[name] for name in written],
        "names": [name.encode() for name in written],
        "data": [fold.documents[name] for name in written],
        "listed": list(listed.values()),
        "sealed": seal(msgspec.json.encode(manifest)),
        **label_values(manifest.about),
        "turns": bigint(manifest.counters.get("turns", 0)),
    }
    return sql["fold"], values


# Blobs: one row each, by tenant and name. Blocking. Ages are by the server's clock


PUT_BYTES = 16 * 1024 * 1024


def put(connection: Connection, sql: Statements, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, up to ``PUT_BYTES`` of them in a statement."""
    require_named(blobs)
    if blobs:
        tenant_number = tenant_id(connection, sql, tenant)
        for part in in_parts(sorted(blobs), lambda name: len(blobs[name]), PUT_BYTES):
            values = [blobs[name] for name in part]
            connection.execute(sql["put_blobs"], (tenant_number, part, values))


def get(connection: Connection, sql: Statements, tenant: str, name: str) -> bytes | None:
    """Return a blob, verified; None when there is none."""
    row = connection.execute(sql["get_blob"], (tenant, name), binary=True).fetchone()
    return None if row is None else verified(name, row[0])


def names(connection: Connection, sql: Statements, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [row[0] for row in connection.execute(sql["blob_names"], (tenant,))]


def renew(connection: Connection, sql: Statements, tenant: str, names: Collection[str]) -> set[str]:
    """Make blobs young, also those that a sweep has moved; return those that do not exist."""
    rows = connection.execute(sql["renew"], (tenant, list(names)))
    return set(names).difference(name for (name,) in rows)


def remove(connection: Connection, sql: Statements, tenant: str, removed: Collection[str]) -> int:
    """Remove blobs at once, and return how many bytes they had."""
    row = connection.execute(sql["remove_blobs"], (tenant, list(removed))).fetchone()
    return int(row[0]) if row else 0


def sweep(
    connection: Connection,
    sql: Statements,
    tenant: str,
    reachable: Collection[str],
    older_than: float,
    among: Collection[str] | None = None,
) -> BlobSweep:
    """Quarantine unreachable blobs, and remove those that were quarantined long enough ago."""
    reached = list(reachable if among is None else set(reachable).intersection(among))
    with connection.transaction():
        # A sweep may take longer than any other statement.
        connection.execute(b"SELECT set_config('statement_timeout', '0', true)")
        connection.execute(sql["come_back"], (tenant, reached))
        values = {
            "tenant": tenant,
            "age": float(older_than),
            "reachable": reached,
            "among": None if among is None else list(among),
        }
        counts = connection.execute(sql["sweep"], values).fetchone()
    return BlobSweep(*map(int, counts)) if counts else BlobSweep()


# Directory of sessions and tenants; removal: delete, trim and scrub


_SCRUBBED = (
    "commits",
    "documents",
    "manifests",
    "labels",
    "inbox",
    "dead_letters",
    "blobs",
    "requests",
    "sessions",
)
_SCRUB_LOCK = 60
"""Seconds that a scrub waits for the lock on a table."""


_AT = "extract(epoch FROM s.updated_at)::float8"
_STEP = "floor(least(greatest(%({})s::float8 / 64, -1e15), 1e15))::bigint"
"""Of a parameter's time; a bigint like the column, or no index would bound it."""
_CONDITIONS = {
    "owner": "s.belongs = %(owner)s",
    "tag": "%(tag)s = ANY(l.tags)",
    "prefix": "s.agent BETWEEN %(prefix)s AND %(prefix)s::text || repeat(chr(1114111), 256) "
    "AND starts_with(s.agent, %(prefix)s)",  # the greatest text: an id has at most 1,024 bytes
    "without": "s.agent <> ALL(%(without)s::text[])",
    "since": f"{_AT} >= %(since)s AND s.step >= {_STEP.format('since')}",
    "before": f"{_AT} < %(before)s AND s.step <= {_STEP.format('before')}",
}
"""Of a listing, by the query's fields."""


def list_sessions(
    connection: Connection, sql: Statements, query: SessionQuery
) -> list[SessionInfo]:
    """List a page of a tenant's sessions."""
    values: dict[str, object] = {
        "tenant": query.tenant,
        "owner": without_nul(query.owner),
        "tag": without_nul(query.tag),
        "prefix": without_nul(query.prefix) or None,
        "without": list(query.without) or None,
        "since": query.since,
        "before": query.before,
        "limit": max(query.limit, 0),
    }
    chosen = [text for name, text in _CONDITIONS.items() if values[name] is not None]
    order = "s.agent, s.session"
    if query.newest_first:
        order = f"s.step DESC, {_AT} DESC, s.agent DESC, s.session DESC"
    if query.after is not None:
        values |= {"agent": query.after.agent, "last": query.after.session}
        values["at"] = query.after_at or 0.0
        if query.newest_first:
            chosen.append(f"({_AT}, s.agent, s.session) < (%(at)s, %(agent)s, %(last)s)")
            chosen.append(f"s.step <= {_STEP.format('at')}")
        else:
            chosen.append("(s.agent, s.session) > (%(agent)s, %(last)s)")
    statement = sql["sessions"]
    for mark, text in (
        (b"{at}", _AT),
        (b"{chosen}", "".join(f" AND {text}" for text in chosen)),
        (b"{order}", order),
    ):
        statement = statement.replace(mark, text.encode())
    rows = connection.execute(statement, values, binary=True)
    return [
        SessionInfo(
            key=SessionKey(agent, session, query.tenant),
            epoch=epoch,
            head=head,
            created_at=created,
            updated_at=updated,
            owner=owner,
            title=title,
            tags=tuple(tags or ()),
            turns=turns or 0,
            damaged=sealed is not None and open_sealed(sealed) is None,
        )
        for _, agent, session, epoch, head, created, updated, owner, title, tags, turns, sealed in (
            rows
        )
    ]


def tenants(connection: Connection, sql: Statements) -> list[str]:
    """List the tenants that have sessions or blobs, by name."""
    return [row[0] for row in connection.execute(sql["tenants"])]


def delete(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    epoch: int,
    keep_posts: bool,  # noqa: FBT001  # passed on by position
) -> None:
    """Remove all that a session owns; its row stays, with its epoch."""
    with connection.transaction():
        row_id = require_held(connection, sql, key, epoch)
        connection.execute(sql["delete"], {"id": row_id, "keep": keep_posts})


def trim(connection: Connection, sql: Statements, key: SessionKey, epoch: int, below: int) -> int:
    """Remove the commits whose records are all below *below*; return how many bytes they had."""
    with connection.transaction():
        row_id = require_held(connection, sql, key, epoch)
        row = connection.execute(sql["trim"], {"id": row_id, "below": below}).fetchone()
    return int(row[0]) if row else 0


def scrub(connection: Connection, sql: Statements) -> None:
    """Rewrite the tables, so that no bytes of removed rows remain in them.

    The server's write-ahead log holds them until it is recycled; a checkpoint, if this user may
    request one, speeds that up.
    """
    name = quoted(sql.schema)
    try:
        connection.execute(b"SET statement_timeout = 0")
        connection.execute(f"SET lock_timeout = '{_SCRUB_LOCK}s'".encode())
        for table in _SCRUBBED:
            connection.execute(f"VACUUM (FULL) {name}.{table}".encode(), prepare=False)
        query = b"SELECT pg_has_role(current_user, 'pg_checkpoint', 'USAGE')"
        if connection.execute(query).fetchone() == (True,):
            connection.execute(b"CHECKPOINT", prepare=False)
    finally:
        connection.close()  # it has other settings than the pool's
