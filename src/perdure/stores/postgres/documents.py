"""Documents and manifests. Blocking.

A fold is one transaction, and a read is one statement: no reader sees part of a fold. A manifest
carries a checksum, and one that fails it counts as lost: the log has all of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping

import msgspec

from perdure.errors import CorruptRecordError, FormatError, UnsupportedVersionError
from perdure.records import json
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import FORMAT, Manifest, matched
from perdure.records.records import open_sealed, seal
from perdure.store import Documents
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.log import require_held
from perdure.stores.postgres.statements import Statements

_log = logging.getLogger("perdure")


class _Format(msgspec.Struct):
    format: int


def read(
    connection: Connection, sql: Statements, key: SessionKey, names: Collection[str] | None
) -> Documents:
    """Read documents, each checked against the manifest's hash."""
    parameters = {
        "tenant": key.tenant,
        "agent": key.agent,
        "session": key.session,
        "ids": None if names is None else [_hash(name) for name in names],
    }
    head, sealed = 0, b""
    stored: dict[str, bytes] = {}
    for row in connection.execute(sql["documents"], parameters, binary=True):
        if row[1] is not None:
            head, sealed = row[0], row[1]
        else:
            stored[row[2].decode("utf-8", "replace")] = row[3]
    manifest = _manifest(key, sealed, head) if sealed else None
    if manifest is None:  # missing or damaged: no stored document can be verified
        return Documents(damaged=tuple(sorted(stored)), remains=stored)
    return matched(manifest, stored, names)


def _manifest(key: SessionKey, sealed: bytes, head: int) -> Manifest | None:
    body = open_sealed(sealed)
    if body is None:
        _log.warning("the manifest of session %s is damaged", key, extra={"session": str(key)})
        return None
    try:
        number = json.decode(body, _Format).format
        manifest = json.decode(body, Manifest) if number <= FORMAT else None
    except FormatError as error:
        _log.warning(
            "the manifest of session %s is damaged",
            key,
            extra={"session": str(key), "why": str(error)},
        )
        return None
    if manifest is None:
        message = (
            f"the manifest of {key} has format {number}, this release reads up to {FORMAT}: use a "
            "newer release of perdure"
        )
        raise UnsupportedVersionError(message, key=str(key), format=number)
    if manifest.key != key:
        message = f"the manifest of {key} belongs to {manifest.key}: restore the table manifests"
        raise CorruptRecordError(message, key=str(key), table="manifests")
    if manifest.as_of_seq > head:
        message = (
            f"the log of {key} ends at record {head}, but documents were made from record "
            f"{manifest.as_of_seq}: rows are missing; restore the tables from a copy, or "
            f"{salvage_cure(key)}"
        )
        raise CorruptRecordError(message, key=str(key), head=head, as_of_seq=manifest.as_of_seq)
    return manifest


def write(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    documents: Mapping[str, bytes],
    manifest: Manifest,
) -> None:
    """Replace documents and the manifest in one transaction."""
    listed = {name: _hash(name) for name in manifest.documents}
    written = [name for name in documents if name in listed]
    sealed = seal(msgspec.json.encode(manifest))
    about = manifest.about
    with connection.transaction():
        row_id = require_held(connection, sql, key, manifest.epoch)
        if written:
            connection.execute(
                sql["write_documents"],
                (
                    row_id,
                    [listed[name] for name in written],
                    [name.encode() for name in written],
                    [documents[name] for name in written],
                ),
            )
        connection.execute(sql["drop_documents"], (row_id, list(listed.values())))
        connection.execute(
            sql["write_manifest"],
            (
                row_id,
                sealed,
                without_nul(about.title),
                without_nul(about.owner),
                [without_nul(tag) for tag in about.tags],
                manifest.counters.get("turns", 0),
            ),
        )


def without_nul(text: str | None) -> str | None:
    """Return a text in the form that a text column can hold: without NUL.

    >>> without_nul("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return None if text is None else text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
