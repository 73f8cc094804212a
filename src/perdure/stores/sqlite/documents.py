"""Documents, blobs, the directory of sessions, and what a restore reads in one snapshot.

Blocking; called within a transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from perdure._lib.logs import LogOnce
from perdure.errors import ConfigError, CorruptRecordError, FormatError
from perdure.records.chunks import require_named, verified
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    Manifest,
    SessionQuery,
    decode_manifest,
    matched,
    require_logged,
    session_info,
)
from perdure.records.records import Record, open_sealed, seal
from perdure.store import BlobSweep, Documents, RestoreData, SessionInfo
from perdure.stores.sqlite.connections import PART_BYTES, next_page
from perdure.stores.sqlite.log import SessionRow, find_to_open, held_row
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


log: logging.Logger = logging.getLogger("perdure")

_warned = LogOnce()


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
    if data is None:  # nothing was folded yet, or it is lost
        return _unlisted_documents(con, row.id, names)
    body = open_sealed(data) if isinstance(data, bytes) else None
    manifest = decode_manifest(body, f"the manifest of {key}", key=str(key))
    if manifest is None or manifest.key != key:
        _warn_damaged(con, key, data)
        return _unlisted_documents(con, row.id, names)
    requested = [name for name in manifest.documents if names is None or name in names]
    return matched(manifest, _stored_documents(con, row.id, requested), names)


def _warn_damaged(con: sqlite3.Connection, key: SessionKey, data: object) -> None:
    """Warn once about each damaged manifest."""
    (_, _, path), *_ = con.execute("PRAGMA database_list").fetchall()
    if _warned.first((path, key, data)):
        message = "the manifest of session %s is damaged in %s; it is rebuilt from the log"
        log.warning(message, key, path, extra={"session": str(key), "path": path})


def _stored_documents(con: sqlite3.Connection, id: int, names: Collection[str]) -> dict[str, bytes]:
    rows = {name: con.execute(Q["document"], {"id": id, "name": name}).fetchone() for name in names}
    return {name: row[0] for name, row in rows.items() if row and isinstance(row[0], bytes)}


def _unlisted_documents(
    con: sqlite3.Connection, id: int, names: Collection[str] | None
) -> Documents:
    """Return stored documents that no readable manifest lists, as damaged ones."""
    rows = con.execute(Q["document_names"], {"id": id}).fetchall()
    lost = [name for (name,) in rows if names is None or name in names]
    return Documents(damaged=tuple(lost), remains=_stored_documents(con, id, lost))


def manifest_in(data: object) -> Manifest | None:
    """Return the manifest of its stored bytes, None if they are damaged."""
    body = open_sealed(data) if isinstance(data, bytes) else None
    if body is None:
        return None
    try:
        return decode(body, Manifest)
    except (FormatError, ConfigError):
        return None


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
    values = {
        "id": row.id,
        "data": seal(msgspec.json.encode(manifest)),
        "owner": manifest.about.owner,
        "tags": msgspec.json.encode([*map(comparable_tag, manifest.about.tags)]).decode(),
    }
    con.execute(Q["put_manifest"], values)


def comparable_tag(tag: str) -> str:
    """Return a tag in the form that is compared: SQLite's JSON ends a text at a NUL.

    >>> comparable_tag("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return tag.replace("\0", "\N{REPLACEMENT CHARACTER}")


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
    freed = 0
    for name in set(removed):
        (size,) = con.execute(Q["blob_size"], {"tenant": tenant, "name": name}).fetchone() or (0,)
        freed += size
        con.execute(Q["delete_blob"], (tenant, name))
    return freed


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


# Directory of sessions by key, as of their last fold. Blocking; called within a transaction


def sessions(con: sqlite3.Connection, query: SessionQuery) -> list[SessionInfo]:
    """List a tenant's sessions by key."""
    values = {
        "tenant": query.tenant,
        "owner": query.owner,
        "tag": None if query.tag is None else comparable_tag(query.tag),
        "prefix": query.prefix,
        "after_agent": query.after.agent if query.after else "",
        "after_session": query.after.session if query.after else "",
        "limit": max(query.limit, 0),
    }
    return [_info(query.tenant, row) for row in con.execute(Q["sessions"], values)]


def _info(tenant: str, row: tuple[object, ...]) -> SessionInfo:
    agent, session, epoch, head, created_at, updated_at, stored = row
    manifest = manifest_in(stored)
    return session_info(
        SessionKey(str(agent), str(session), tenant),
        manifest,
        epoch=epoch,
        head=head,
        created_at=created_at,
        updated_at=updated_at,
        damaged=manifest is None and stored is not None,
    )


def tenants(con: sqlite3.Connection) -> list[str]:
    """List the tenants that have sessions or blobs."""
    return [tenant for (tenant,) in con.execute(Q["tenants"])]


# All that a restore reads, in one snapshot


def read_to_restore(
    con: sqlite3.Connection,
    key: SessionKey,
    found: tuple[SessionRow | None, object, bool],
    names: Collection[str] | None,
) -> RestoreData:
    """Read documents, and the log after them, of a session that was found to be opened.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    row, data, is_waiting = found
    have = _documents(con, key, row, data, names)
    after = have.log_after
    records = None if after is None else _records_after(con, row, after)
    return RestoreData(have, after or 0, records, is_waiting)


def _records_after(
    con: sqlite3.Connection, row: SessionRow | None, after: int
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if it is long or damaged."""
    if row is None or not row.epoch or row.is_hidden:
        return ()
    try:
        page = next_page(con, row, None, after, PART_BYTES, PART_BYTES)
    except CorruptRecordError:  # raised when the log is read
        return None
    if page is None:
        return ()
    return None if page.more else tuple([one for one in page.records if one.seq > after])
