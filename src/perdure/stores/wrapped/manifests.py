"""Manifests in two forms: the engine's outer manifest, and the inner one that the store sees.

The inner manifest lists the hashes of the transformed documents. What only the engine may see
(the plain hashes and sizes, title, owner and tags) is in the inner manifest's title, transformed.
Owner and tags are tokens in addition, so that listings can filter by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress

import msgspec

from perdure.errors import CorruptRecordError, FormatError
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, FoldedDocument, Manifest
from perdure.store import Document, SessionInfo
from perdure.stores.wrapped.chain import NOTHING_PROVEN, ChainLink, ManifestProof
from perdure.stores.wrapped.transform import Place, Transform

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
    """Whether nothing was folded yet: the manifest only lists the data key's document."""


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


def require_proven(manifest: Manifest, proof: ManifestProof) -> None:
    """Check that an inner manifest is the one that its proof was written for.

    Raises:
        CorruptRecordError: It was changed.

    """
    actual = (manifest.epoch, manifest.as_of_seq, _counters_hash(manifest))
    if actual != (proof.epoch, proof.as_of_seq, proof.rest):
        raise CorruptRecordError(
            f"the manifest of {manifest.key} was changed without the key", key=str(manifest.key)
        )


def unproven_tail(key: SessionKey, end: int = 0, reason: str = "") -> str:
    """Return the warning that a log may have been longer.

    Args:
        key: The session.
        end: The last record when its manifest was found to be lost or forged, 0 if unknown.
        reason: What is wrong with the manifest.

    """
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


def manifest_place(key: SessionKey) -> Place:
    """Return the place of a manifest's hidden part."""
    return ("manifest", key.agent, key.session)


def has_hidden(title: str | None) -> bool:
    """Return whether a manifest's title contains a hidden part."""
    return title is not None and title.startswith(_MARK)


def inner_documents(
    manifest: Manifest,
    names: Mapping[str, str],
    encoded: Mapping[str, bytes],
    wrong: Collection[str],
    known: Mapping[str, FoldedDocument],
) -> dict[str, FoldedDocument]:
    """Return the documents that an inner manifest lists.

    Args:
        manifest: The outer manifest.
        names: Under which names its documents are stored.
        encoded: Those that are written now.
        wrong: Those of them that are listed with a hash that no bytes have.
        known: What the inner manifest lists of the others.

    """
    documents: dict[str, FoldedDocument] = {}
    for name, folded in manifest.documents.items():
        stored, data = names[name], encoded.get(name)
        if data is None:
            old = known.get(stored)
            sha256 = old.sha256 if old else _LOST
            documents[stored] = FoldedDocument(folded.as_of_seq, sha256, folded.size)
        else:
            entry = FoldedDocument.of(folded.as_of_seq, data)
            lost = msgspec.structs.replace(entry, sha256=_LOST)
            documents[stored] = lost if name in wrong else entry
    return documents


def with_hidden(manifest: Manifest, hidden: HiddenManifest, transform: Transform) -> Manifest:
    """Return an inner manifest with a hidden part in its title."""
    about = hidden.about
    payload = transform.transform_payload(manifest_place(manifest.key), msgspec.json.encode(hidden))
    return msgspec.structs.replace(
        manifest,
        about=msgspec.structs.replace(
            about,
            title=_MARK + payload.decode(),
            owner=None if about.owner is None else transform.token(about.owner),
            tags=tuple(map(transform.token, about.tags)),
        ),
    )


def outer_manifest(inner: Manifest, hidden: HiddenManifest) -> Manifest:
    """Return the engine's manifest from an inner one and its hidden part."""
    return msgspec.structs.replace(inner, documents=hidden.documents, about=hidden.about)


def inner_about(key: SessionKey, about: About, transform: Transform) -> About:
    """Return what a save says for the directory, as the inner store sees it."""
    payload = transform.transform_payload(_labels_place(key), msgspec.json.encode(about))
    return About(
        title=_LABELS + payload.decode(),
        owner=None if about.owner is None else transform.token(about.owner),
        tags=tuple(map(transform.token, about.tags)),
    )


def _labels_place(key: SessionKey) -> Place:
    return ("labels", key.agent, key.session)


def restore_info(info: SessionInfo, transform: Transform | None) -> SessionInfo:
    """Return a listing's original entry; title, owner and tags are left out if damaged."""
    title = info.title
    if title is None or not title.startswith((_MARK, _LABELS)):
        return info
    try:
        if title.startswith(_MARK):
            about = _decode_hidden(info.key, title, transform).about
        elif transform is None:
            about = About()
        else:
            sealed = title.removeprefix(_LABELS).encode()
            about = decode(transform.restore_payload(_labels_place(info.key), sealed), About)
    except (CorruptRecordError, FormatError):
        about = About()
    return msgspec.structs.replace(info, title=about.title, owner=about.owner, tags=about.tags)


def read_hidden(inner: Manifest, transform: Transform | None) -> HiddenManifest:
    """Return an inner manifest's hidden part.

    Raises:
        CorruptRecordError: It is damaged, or the manifest around it was changed.

    """
    hidden = _decode_hidden(inner.key, inner.about.title, transform)
    if hidden.proof is not None:
        require_proven(inner, hidden.proof)
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
        hidden = read_hidden(manifest, tenant) if has_hidden(manifest.about.title) else None
    except CorruptRecordError as error:
        return None, _lost(str(error))
    if hidden is not None and hidden.proof is not None:
        return hidden, hidden.proof
    if is_chained:
        return None, _lost(f"the manifest of {manifest.key} was not written with the key")
    return hidden, NOTHING_PROVEN


def _lost(reason: str) -> ManifestProof:
    return msgspec.structs.replace(NOTHING_PROVEN, lost=reason)


def _decode_hidden(
    key: SessionKey, title: str | None, transform: Transform | None
) -> HiddenManifest:
    message = f"the manifest of {key} is damaged: restore it from a copy"
    if transform is None or title is None:
        raise CorruptRecordError(message, key=str(key))
    payload = transform.restore_payload(manifest_place(key), title.removeprefix(_MARK).encode())
    try:
        return decode(payload, HiddenManifest)
    except FormatError as error:
        raise CorruptRecordError(message, key=str(key)) from error


def mismatched(manifest: Manifest, documents: Mapping[str, bytes]) -> Collection[str]:
    """Return the names of documents whose bytes have another hash than the manifest lists."""
    return [
        name
        for name, data in documents.items()
        if name in manifest.documents and _sha256(data) != manifest.documents[name].sha256
    ]


def transform_document(
    transform: Transform, name: str, data: bytes, proof: ManifestProof | None, as_of: int
) -> bytes:
    """Return a document transformed; with a proof, it is also bound to its ``as_of`` record."""
    if proof is None:
        return transform.transform(("document", name), data)
    return transform.transform(("folded", name), as_of.to_bytes(8, "big") + data)


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
            return data[8:], as_of if as_of == document.as_of_seq else 0
    return transform.restore(("document", name), document.data), 0  # written before proofs existed


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
