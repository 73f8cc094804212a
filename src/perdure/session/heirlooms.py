"""Documents as they pass from one session to another, and between two ways of numbering.

Pure.
"""

from __future__ import annotations

import hashlib

import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import FormatError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import SESSION, WholeSessionDocument
from perdure.model.base import Base
from perdure.model.keys import SessionKey
from perdure.model.manifest import FoldedDocument, Manifest
from perdure.store import Document, Documents

__all__ = ["handed_down", "lowered", "raised", "upto"]


def raised(have: Documents, at: int) -> Documents:
    """Return a session's own documents, numbered behind what came before its log."""
    if have.manifest is None or not at:
        return have
    found = {name: Document(one.data, one.as_of_seq + at) for name, one in have.found.items()}
    return msgspec.structs.replace(have, manifest=_shifted(have.manifest, at), found=found)


def upto(have: Documents, seq: int) -> Documents:
    """Return documents as of a record up to *seq*, none if they are of a later one.

    A fold that was killed leaves some that are further than their manifest: those are no use.
    """
    if have.manifest is None or have.manifest.as_of_seq > seq:
        return Documents()
    late = {name for name, one in have.found.items() if one.as_of_seq > seq}
    if not late:
        return have
    return msgspec.structs.replace(
        have,
        found={name: one for name, one in have.found.items() if name not in late},
        damaged=(*have.damaged, *sorted(late)),
        why={**have.why, **dict.fromkeys(late, f"it is further than record {seq}")},
    )


def lowered(manifest: Manifest, base: Base) -> Manifest:
    """Return a manifest as the session's own store takes it, naming what came before."""
    return msgspec.structs.replace(_shifted(manifest, -base.at), base=base)


def _shifted(manifest: Manifest, by: int) -> Manifest:
    documents = {
        name: msgspec.structs.replace(one, as_of_seq=max(one.as_of_seq + by, 0))
        for name, one in manifest.documents.items()
    }
    as_of = max(manifest.as_of_seq + by, 0)
    return msgspec.structs.replace(manifest, as_of_seq=as_of, documents=documents)


def handed_down(have: Documents, key: SessionKey, base: Base) -> Documents:
    """Return another session's documents as those that a session of this key begins with."""
    if have.manifest is None:
        return Documents()
    found = {name: _renamed(name, one, key) for name, one in have.found.items()}
    listed = dict(have.manifest.documents)
    for name, one in found.items():
        digest = hashlib.sha256(one.data).hexdigest()
        listed[name] = FoldedDocument(one.as_of_seq, digest, len(one.data))
    manifest = msgspec.structs.replace(
        have.manifest, key=key, epoch=0, documents=listed, base=base, position=msgspec.Raw(b"null")
    )
    return msgspec.structs.replace(have, manifest=manifest, found=found)


def _renamed(name: str, document: Document, key: SessionKey) -> Document:
    """Return a document under the session's own name, where it has a name in it."""
    try:
        if name == SNAPSHOT:
            snapshot = decode(document.data, Snapshot)
            if (snapshot.agent_id, snapshot.session_id) == (key.agent, key.session):
                return document
            snapshot.agent_id, snapshot.session_id = key.agent, key.session
            return Document(encode(snapshot), document.as_of_seq)
        if name == SESSION:
            described = decode(document.data, WholeSessionDocument)
            if (described.agent_id, described.session_id) == (key.agent, key.session):
                return document
            described.agent_id, described.session_id = key.agent, key.session
            described.tenant = key.tenant
            data = msgspec.json.format(encode(described), indent=2)
            return Document(data, document.as_of_seq)
    except FormatError:
        return document  # whoever reads it finds out, and makes it anew
    return document
