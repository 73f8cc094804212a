"""Documents, and the manifest that lists them, replaced in one transaction. Blocking."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from perdure._lib.logs import LogOnce
from perdure.errors import ConfigError, FormatError, UnsupportedVersionError
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Manifest, matched
from perdure.records.records import open_sealed, seal
from perdure.store import Documents
from perdure.stores.sqlite.log import DELETED, find, held_row
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
    row = find(con, key)
    if row is None or row.state == DELETED:
        return Documents()
    stored = con.execute(Q["manifest"], {"id": row.id}).fetchone()
    if stored is None:  # nothing was folded yet, or it is lost
        return _unlisted_documents(con, row.id, names)
    manifest = manifest_in(stored[0])
    if manifest is None or manifest.key != key:
        _warn_damaged(con, key, stored[0])
        return _unlisted_documents(con, row.id, names)
    if manifest.format > FORMAT:
        message = (
            f"the manifest of {key} has format {manifest.format}, this release reads up to "
            f"{FORMAT}: use a newer release of perdure"
        )
        raise UnsupportedVersionError(message, key=str(key), format=manifest.format)
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

    """
    row = held_row(con, key, manifest.epoch)
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
