"""Documents, blobs, the directory of sessions, and what a restore reads in one snapshot.

Blocking; called within a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    About,
    Manifest,
    SessionQuery,
    require_logged,
    session_info,
)
from perdure.records.records import Record, open_sealed, seal
from perdure.records.rows import stored_documents
from perdure.store import BlobSweep, Documents, RestoreData, SessionInfo
from perdure.stores.sqlite.log import (
    SessionRow,
    comparable_tag,
    find_to_open,
    held_row,
    labels_of,
    newest_records,
    records_after,
)
from perdure.stores.sqlite.sql import Q


def read(con: sqlite3.Connection, key: SessionKey, names: Collection[str] | None) -> Documents:
    """Read documents, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    row, data, _ = find_to_open(con, key)
    return _documents(con, key, row, data, names)


def _documents(
    con: sqlite3.Connection,
    key: SessionKey,
    row: SessionRow | None,
    data: object,
    names: Collection[str] | None,
) -> Documents:
    """Read the documents of a session's row and manifest; raises as `read`."""
    if row is None or row.is_hidden:
        return Documents()
    rows: Iterable[tuple[bytes, object]] = ()
    if names is None:
        rows = con.execute(Q["documents"], (row.id,))
    elif names:
        query = Q["documents_named"].format(marks=", ".join("?" * len(names)))
        rows = con.execute(query, (row.id, *names))
    stored = {name.decode(errors="replace"): body for name, body in rows if type(body) is bytes}

    def path() -> str:
        (_, _, path), *_ = con.execute("PRAGMA database_list").fetchall()
        return str(path)

    return stored_documents(key, row.head, data, stored, names, place=path)


def write(
    con: sqlite3.Connection, key: SessionKey, new: Mapping[str, bytes], manifest: Manifest
) -> None:
    """Replace documents and the manifest.

    Raises:
        LeaseLostError: The manifest's epoch is not the newest.
        AcknowledgedRecordsLostError: The log lacks records that the manifest is as of.

    """
    row = held_row(con, key, manifest.epoch)
    require_logged(manifest, row.head)
    listed = manifest.documents
    con.executemany(
        Q["put_document"], [(row.id, name, data) for name, data in new.items() if name in listed]
    )
    stored_names = [name for (name,) in con.execute(Q["document_names"], {"id": row.id})]
    con.executemany(
        Q["delete_document"], [(row.id, name) for name in stored_names if name not in listed]
    )
    con.execute(Q["put_manifest"], {"id": row.id, "data": seal(msgspec.json.encode(manifest))})
    listed_values = {
        "id": row.id,
        "as_of": manifest.as_of_seq,
        "turns": manifest.counters.get("turns", 0),
        **labels_of(manifest.about),
    }
    con.execute(Q["list_manifest"], listed_values)


# Blobs, and the sweep of unreachable ones. Blocking; called within a transaction


def put(con: sqlite3.Connection, tenant: str, blobs: Mapping[str, bytes], now: float) -> None:
    """Store blobs; putting bytes that exist renews their age.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    require_named(blobs)
    con.executemany(Q["put_blob"], [(tenant, name, now, data) for name, data in blobs.items()])


def get(con: sqlite3.Connection, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if it does not exist.

    Raises:
        CorruptRecordError: Its bytes do not match its name.

    """
    row = con.execute(Q["blob"], {"tenant": tenant, "name": name}).fetchone()
    if row is None:
        return None
    (data,) = row
    return verified(name, data if isinstance(data, bytes) else b"")


def names(con: sqlite3.Connection, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [name for (name,) in con.execute(Q["blob_names"], {"tenant": tenant})]


def renew(con: sqlite3.Connection, tenant: str, names: Collection[str], now: float) -> set[str]:
    """Make blobs young, also those that a sweep has moved; return those that do not exist."""
    values = {"tenant": tenant, "now": now}
    return {
        name
        for name in names
        if not con.execute(Q["renew_blob"], {**values, "name": name}).rowcount
    }


def remove(con: sqlite3.Connection, tenant: str, removed: Collection[str]) -> int:
    """Remove blobs, and return how many bytes they had."""
    values = {"tenant": tenant, "names": msgspec.json.encode(removed).decode()}
    (freed,) = con.execute(Q["blobs_size"], values).fetchone()
    con.execute(Q["delete_blobs"], values)
    return int(freed)


def sweep(
    con: sqlite3.Connection,
    tenant: str,
    keep: frozenset[str],
    among: frozenset[str] | None,
    older_than: float,
    now: float,
) -> BlobSweep:
    """Remove blobs that were quarantined long enough ago, then quarantine unreachable ones."""
    moved: list[tuple[float | None, str, str]] = []
    expired: list[tuple[str, str]] = []
    quarantined = freed = 0
    for name, renewed_at, moved_at, size in con.execute(Q["blobs"], {"tenant": tenant}).fetchall():
        if among is not None and name not in among:
            continue
        _require_times(name, renewed_at, moved_at)
        if name in keep:
            if moved_at is not None:
                moved.append((None, tenant, name))
        elif moved_at is None:
            if now - renewed_at >= older_than:
                moved.append((now, tenant, name))
                quarantined += 1
        elif now - moved_at >= older_than:
            expired.append((tenant, name))
            freed += size
    con.executemany(Q["move_blob"], moved)
    con.executemany(Q["delete_blob"], expired)
    return BlobSweep(quarantined, len(expired), freed)


def _require_times(name: object, renewed_at: object, moved_at: object) -> None:
    """Raise if a row does not hold its blob's age: nothing is removed by guessing."""
    if not isinstance(renewed_at, float) or not isinstance(moved_at, float | None):
        raise CorruptRecordError(
            f"blob {name!r} is damaged in the database: its row has times of other types; nothing "
            "was removed: restore the database from a copy, or run `perdure check`",
            blob=str(name),
        )


# Directory of sessions. Blocking; called within a transaction


_ABOUT = msgspec.json.Decoder(About)
_CONDITIONS = {
    "owner": "user = :owner",
    "tag": "EXISTS (SELECT 1 FROM json_each(tags) WHERE value = :tag)",
    "prefix": "agent >= :prefix AND substr(agent, 1, length(:prefix)) = :prefix",
    "without": "agent NOT IN (SELECT value FROM json_each(:without))",
    "since": "updated_at >= :since AND step >= CAST(:since / 64 AS INTEGER)",
    "before": "updated_at < :before AND step <= CAST(:before / 64 AS INTEGER)",
}
"""Of a listing, by the query's fields."""


def sessions(con: sqlite3.Connection, query: SessionQuery) -> list[SessionInfo]:
    """List a page of a tenant's sessions."""
    values: dict[str, object] = {
        "tenant": query.tenant,
        "owner": query.owner,
        "tag": None if query.tag is None else comparable_tag(query.tag),
        "prefix": query.prefix or None,
        "without": msgspec.json.encode(query.without).decode() if query.without else None,
        "since": query.since,
        "before": query.before,
        "limit": max(query.limit, 0),
    }
    chosen = ["tenant = :tenant"]
    chosen += [text for name, text in _CONDITIONS.items() if values[name] is not None]
    index = "session_by_use" if query.newest_first else "session_by_key"
    order = "agent, session"
    if query.newest_first:
        order = "step DESC, updated_at DESC, agent DESC, session DESC"
    if query.owner is not None:
        index = "session_by_user"
    if query.after is not None:
        values |= {"agent": query.after.agent, "session": query.after.session}
        values["at"] = query.after_at or 0.0
        if query.newest_first:
            chosen.append("(updated_at, agent, session) < (:at, :agent, :session)")
            chosen.append("step <= CAST(:at / 64 AS INTEGER)")
        else:
            chosen.append("(agent, session) > (:agent, :session)")
    statement = Q["sessions"].format(index=index, chosen=" AND ".join(chosen), order=order)
    return [_info(query.tenant, row) for row in con.execute(statement, values)]


def _info(tenant: str, row: tuple[Any, ...]) -> SessionInfo:
    _, agent, session, epoch, head, created_at, updated_at, turns, labels, stored = row
    try:
        about = None if labels is None else _ABOUT.decode(labels)
    except (msgspec.DecodeError, TypeError):  # damaged; the next fold says it again
        about = None
    return session_info(
        SessionKey(str(agent), str(session), tenant),
        None,
        epoch=epoch,
        head=head,
        created_at=created_at,
        updated_at=updated_at,
        turns=turns,
        about=about,
        damaged=stored is not None and (type(stored) is not bytes or open_sealed(stored) is None),
    )


def tenants(con: sqlite3.Connection) -> list[str]:
    """List the tenants that have sessions or blobs."""
    return [tenant for (tenant,) in con.execute(Q["tenants"])]


# All that a restore reads, in one snapshot


def read_to_restore(
    con: sqlite3.Connection, key: SessionKey, names: Collection[str] | None, newest: int = 0
) -> RestoreData:
    """Read documents, and the log after them; and its so many newest messages.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    return restore_data(con, key, find_to_open(con, key), names, newest)


def restore_data(
    con: sqlite3.Connection,
    key: SessionKey,
    found: tuple[SessionRow | None, object, bool],
    names: Collection[str] | None,
    newest: int = 0,
) -> RestoreData:
    """Read the same of a session that was found to be opened."""
    row, data, is_waiting = found
    have = _documents(con, key, row, data, names)
    after = have.log_after
    page: tuple[Record, ...] = ()
    if newest and row is not None and not row.is_hidden:
        page = newest_records(con, row, newest)
    records: tuple[Record, ...] | None = None
    if after is not None and page and page[-1].seq <= after + 1:  # it has them, and is verified
        records = tuple(record for record in reversed(page) if record.seq > after)
    elif after is not None:
        records = records_after(con, row, after)
    return RestoreData(have, after or 0, records, is_waiting, newest=page)
