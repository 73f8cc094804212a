"""Manifests in two forms: the engine's outer manifest, and the inner one that the store sees.

The inner manifest lists the hashes of the transformed documents. What only the engine may see
(the plain hashes and sizes, title, owner and tags) is in the inner manifest's title, transformed.
Owner and tags are tokens in addition, so that listings can filter by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from perdure.errors import CorruptRecordError, FormatError
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, FoldedDocument, Manifest
from perdure.store import Document, SessionInfo
from perdure.stores.wrapped.chain import NOTHING_PROVEN, ChainLink, ManifestProof
from perdure.stores.wrapped.transform import Transform

T = TypeVar("T")

_MARK = "perdure-sealed:"
_LABELS = "perdure-labels:"
_LOST = "0" * 64
MISSING = "the manifest is missing or damaged, and the session had one"


class HiddenManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a manifest that the inner store does not see."""

    about: About
    documents: dict[str, FoldedDocument]
    proof: ManifestProof | None = None
    """None for a session that was not opened since hash chains were introduced."""
    is_begun: bool = False
    """True if nothing was folded yet: the manifest only lists the data key's document."""


def proof_of(
    manifest: Manifest, link: ChainLink | None = None, *, lost: str = "", unproven_end: int = 0
) -> ManifestProof:
    """Return the proof of an inner manifest."""
    return ManifestProof(
        manifest.epoch,
        manifest.as_of_seq,
        _counters_hash(manifest),
        "" if link is None else link.digest.hex(),
        0 if link is None else link.run,
        lost,
        unproven_end,
    )


def _counters_hash(manifest: Manifest) -> str:
    counters = sorted(manifest.counters.items())
    return _sha256(msgspec.json.encode((manifest.format, counters, manifest.base)))


def unproven_end(hidden: HiddenManifest | None) -> int:
    """Return the last record when a manifest was found to be lost or forged, 0 if none was."""
    return 0 if hidden is None or hidden.proof is None else hidden.proof.unproven_end


def unproven_tail(key: SessionKey, end: int, reason: str = "") -> str:
    """Return the warning that a log may have been longer; empty without a sign of it.

    Args:
        key: The session.
        end: The last record when its manifest was found to be lost or forged, 0 if unknown.
        reason: The fault of the manifest.

    """
    if not end and not reason:
        return ""
    problem = (
        f"was lost or forged when the log ended at record {end}"
        if end
        else f"proves nothing ({reason})"
    )
    position = f"record {end}" if end else "its end"
    return (
        f"the log of {key} may be incomplete: its manifest {problem}, and whether records after "
        f"{position} were cut off before that cannot be known"
    )


def inner_documents(
    manifest: Manifest,
    names: Mapping[str, str],
    written: Mapping[str, bytes],
    known: Mapping[str, FoldedDocument],
) -> dict[str, FoldedDocument]:
    """Return the documents that an inner manifest lists.

    Args:
        manifest: The outer manifest.
        names: Under which names its documents are stored.
        written: Those that are written now, as they are stored.
        known: What the inner manifest lists of the others.

    """
    documents: dict[str, FoldedDocument] = {}
    for name, entry in manifest.documents.items():
        stored = names[name]
        if stored in written:
            documents[stored] = FoldedDocument.of(entry.as_of_seq, written[stored])
        else:
            # An unknown one gets a hash that no bytes have, so that it reads as damaged.
            sha256 = known[stored].sha256 if stored in known else _LOST
            documents[stored] = FoldedDocument(entry.as_of_seq, sha256, entry.size)
    return documents


def with_hidden(manifest: Manifest, hidden: HiddenManifest, transform: Transform) -> Manifest:
    """Return an inner manifest with a hidden part in its title."""
    data = msgspec.json.encode(hidden)
    about = _sealed(_MARK, "manifest", manifest.key, hidden.about, data, transform)
    return msgspec.structs.replace(manifest, about=about)


def sealed_labels(key: SessionKey, about: About, transform: Transform) -> About:
    """Return what a save says for the directory, as the inner store sees it."""
    return _sealed(_LABELS, "labels", key, about, msgspec.json.encode(about), transform)


def _sealed(
    mark: str, kind: str, key: SessionKey, about: About, data: bytes, transform: Transform
) -> About:
    """Return labels with data hidden in their title, and tokens for the others."""
    payload = transform.transform_payload((kind, key.agent, key.session), data)
    return msgspec.structs.replace(
        about,
        title=mark + payload.decode(),
        owner=None if about.owner is None else transform.token(about.owner),
        tags=tuple(map(transform.token, about.tags)),
    )


def _unsealed(
    mark: str, place: str, key: SessionKey, title: str, transform: Transform | None, kind: type[T]
) -> T:
    message = f"the manifest of {key} is damaged: restore it from a copy"
    if transform is None:
        raise CorruptRecordError(message, key=str(key))
    sealed = title.removeprefix(mark).encode()
    payload = transform.restore_payload((place, key.agent, key.session), sealed)
    try:
        return decode(payload, kind)
    except FormatError as error:
        raise CorruptRecordError(message, key=str(key)) from error


def restore_info(info: SessionInfo, transform: Transform | None) -> SessionInfo:
    """Return a listing's original entry; title, owner and tags are left out if damaged."""
    key, title, about = info.key, info.title, About()
    if title is None or not title.startswith((_MARK, _LABELS)):
        return info
    with suppress(CorruptRecordError):
        if title.startswith(_MARK):
            about = _unsealed(_MARK, "manifest", key, title, transform, HiddenManifest).about
        else:
            about = _unsealed(_LABELS, "labels", key, title, transform, About)
    return msgspec.structs.replace(info, title=about.title, owner=about.owner, tags=about.tags)


def read_hidden(inner: Manifest, transform: Transform | None) -> HiddenManifest | None:
    """Return an inner manifest's hidden part, None if it has none.

    Raises:
        CorruptRecordError: It is damaged, or the manifest around it was changed.

    """
    title = inner.about.title
    if title is None or not title.startswith(_MARK):
        return None
    hidden = _unsealed(_MARK, "manifest", inner.key, title, transform, HiddenManifest)
    # What the inner store has in clear must be what was sealed with it.
    actual = (inner.epoch, inner.as_of_seq, _counters_hash(inner))
    proof = hidden.proof
    if proof is not None and actual != (proof.epoch, proof.as_of_seq, proof.rest):
        raise CorruptRecordError(
            f"the manifest of {inner.key} was changed without the key", key=str(inner.key)
        )
    return hidden


def proven_part(
    manifest: Manifest | None, tenant: Transform | None, *, is_chained: bool
) -> tuple[HiddenManifest | None, ManifestProof]:
    """Return an inner manifest's hidden part, and what it proves; ``lost`` if it is not to be used.

    Args:
        manifest: The inner manifest; None if it is missing.
        tenant: The transform of the hidden part.
        is_chained: Whether the session's manifests have a proof.

    """
    if manifest is None:
        return None, _lost(MISSING if is_chained else "")
    try:
        hidden = read_hidden(manifest, tenant)
    except CorruptRecordError as error:
        return None, _lost(str(error))
    if hidden is not None and hidden.proof is not None:
        return hidden, hidden.proof
    # Else an old manifest, from before the proofs, could be put back in place of a newer one.
    if is_chained:
        return None, _lost(f"the manifest of {manifest.key} was not written with the key")
    return hidden, NOTHING_PROVEN


def _lost(reason: str) -> ManifestProof:
    return msgspec.structs.replace(NOTHING_PROVEN, lost=reason)


def transform_document(
    transform: Transform,
    name: str,
    data: bytes,
    listed: FoldedDocument,
    proof: ManifestProof | None,
) -> bytes:
    """Return a document transformed; with a proof, it is also bound to its ``as_of`` record.

    Without one, nothing is stored of a document that is not as it is listed: it reads as damaged.
    """
    if proof is not None:
        return transform.transform(("folded", name), listed.as_of_seq.to_bytes(8, "big") + data)
    if listed != FoldedDocument.of(listed.as_of_seq, data):
        return b""
    return transform.transform(("document", name), data)


def restore_documents(
    transform: Transform, inner: Mapping[str, Document], hidden: HiddenManifest
) -> dict[str, Document]:
    """Return the original documents, without those that are damaged or of an older fold.

    A document of a newer fold is valid: its writer was killed before writing the manifest.
    """
    documents: dict[str, Document] = {}
    for name, document in inner.items():
        with suppress(CorruptRecordError):
            data, as_of = _restore_document(transform, name, document, hidden)
            entry = hidden.documents.get(name)
            if hidden.proof is not None and (
                entry is None or (entry.sha256 != _sha256(data) and not as_of > entry.as_of_seq)
            ):
                continue
            documents[name] = Document(data, document.as_of_seq)
    return documents


def _restore_document(
    transform: Transform, name: str, document: Document, hidden: HiddenManifest
) -> tuple[bytes, int]:
    """Return a document, and the record that it is proven to be as of, 0 for none."""
    if hidden.proof is not None:
        with suppress(CorruptRecordError):
            data = transform.restore(("folded", name), document.data)
            as_of = int.from_bytes(data[:8], "big")
            # The record in clear may have been changed: then it proves nothing.
            return data[8:], as_of if as_of == document.as_of_seq else 0
    return transform.restore(("document", name), document.data), 0  # written before proofs existed


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
