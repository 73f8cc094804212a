"""Manifests in two forms: the engine's, and what the inner store may know of it.

The inner manifest lists the sealed bytes' hashes. What only the engine should see (the plain
hashes and sizes, title, owner and tags) travels in its title, sealed; owner and tags are
tokens as well, so that a listing can be asked for them. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from perdure.codec.json import decode
from perdure.errors import CorruptRecordError, FormatError
from perdure.model.keys import SessionKey
from perdure.model.manifest import About, FoldedDocument, Manifest
from perdure.store import SessionInfo
from perdure.stores.wrapped.sealing import Place, Seal

__all__ = ["folded_of", "inner_of", "is_ours", "listed", "outer_of", "place_of", "unfit"]

_MARK = "perdure-sealed:"
_LOST = "0" * 64


class Hidden(msgspec.Struct, frozen=True):
    """What the inner store does not see."""

    about: About
    documents: dict[str, FoldedDocument]


def place_of(key: SessionKey) -> Place:
    """Return the place of what a manifest hides."""
    return ("manifest", key.agent, key.session)


def is_ours(title: str | None) -> bool:
    """Say whether a manifest was made here."""
    return title is not None and title.startswith(_MARK)


def inner_of(
    manifest: Manifest,
    sealed: Mapping[str, bytes],
    before: Manifest | None,
    own: Mapping[str, FoldedDocument],
    seal: Seal,
) -> Manifest:
    """Return what the inner store is given.

    Args:
        manifest: The engine's.
        sealed: The documents that are written now.
        before: The inner manifest until now, which knows the others.
        own: The wrapper's own documents.
        seal: The tenant's.

    """
    known = before.documents if before else {}
    documents: dict[str, FoldedDocument] = {}
    for name, folded in manifest.documents.items():
        data = sealed.get(name)
        old = known.get(name)
        if data is not None:
            there = folded_of(data, folded.as_of_seq)
        else:
            there = FoldedDocument(folded.as_of_seq, old.sha256 if old else _LOST, folded.size)
        documents[name] = there
    for name, folded in own.items():
        documents[name] = msgspec.structs.replace(folded, as_of_seq=manifest.as_of_seq)
    about = manifest.about
    hidden = msgspec.json.encode(Hidden(about, manifest.documents))
    payload = seal.seal_payload(place_of(manifest.key), hidden)
    return msgspec.structs.replace(
        manifest,
        documents=documents,
        about=msgspec.structs.replace(
            about,
            title=_MARK + payload.decode(),
            owner=None if about.owner is None else seal.token(about.owner),
            tags=tuple(map(seal.token, about.tags)),
        ),
    )


def folded_of(data: bytes, as_of_seq: int) -> FoldedDocument:
    """Return what a manifest says of a document with these bytes."""
    return FoldedDocument(as_of_seq, _sha256(data), len(data))


def outer_of(inner: Manifest, seal: Seal | None) -> Manifest:
    """Return the engine's manifest.

    Raises:
        CorruptRecordError: What it hides is damaged.

    """
    hidden = _hidden(inner.key, inner.about.title, seal)
    return msgspec.structs.replace(inner, documents=hidden.documents, about=hidden.about)


def listed(info: SessionInfo, seal: Seal | None) -> SessionInfo:
    """Return a listing's line as it was before it was sealed; what is damaged stays unsaid."""
    if not is_ours(info.title):
        return info
    try:
        about = _hidden(info.key, info.title, seal).about
    except CorruptRecordError:
        about = About()
    return msgspec.structs.replace(info, title=about.title, owner=about.owner, tags=about.tags)


def _hidden(key: SessionKey, title: str | None, seal: Seal | None) -> Hidden:
    message = f"the manifest of {key} is damaged: restore it from a copy"
    if seal is None or title is None:
        raise CorruptRecordError(message, key=str(key))
    opened = seal.open_payload(place_of(key), title.removeprefix(_MARK).encode())
    try:
        return decode(opened, Hidden)
    except FormatError as error:
        raise CorruptRecordError(message, key=str(key)) from error


def unfit(manifest: Manifest, documents: Mapping[str, bytes]) -> Collection[str]:
    """Return the documents whose bytes are not those that the manifest lists."""
    return [
        name
        for name, data in documents.items()
        if name in manifest.documents and _sha256(data) != manifest.documents[name].sha256
    ]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
