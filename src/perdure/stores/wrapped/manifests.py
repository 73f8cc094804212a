"""Manifests in two forms: the engine's, and what the inner store may know of it.

The inner manifest lists the sealed bytes' hashes. What only the engine should see (the plain
hashes and sizes, title, owner and tags) travels in its title, sealed; owner and tags are
tokens as well, so that a listing can be asked for them. Pure.
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
from perdure.stores.wrapped.chain import ChainLink, Facts
from perdure.stores.wrapped.transform import Place, Transform

_MARK = "perdure-sealed:"
_LOST = "0" * 64


class ManifestProof(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a manifest has to be, and what its log was when it was written."""

    epoch: int
    as_of_seq: int
    rest: str
    """A hash of its counters and of its base."""
    digest: str = ""
    """The link behind ``as_of_seq``, in hex; empty where nothing was folded by it."""
    run: int = 0
    lost: str = ""
    """Why there is no fold: what was wrong with the manifest before this one."""
    unproven_end: int = 0
    """The last record when a manifest was found lost or forged: records behind it may have been
    cut off. It stays through the folds that follow, until somebody accepts the log."""


class HiddenManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the inner store does not see."""

    about: About
    documents: dict[str, FoldedDocument]
    proof: ManifestProof | None = None
    """Missing in manifests of sessions that nobody has opened since there are chains."""
    is_begun: bool = False
    """Whether nothing was folded yet: the manifest is there for the key alone."""


def proof_of(
    manifest: Manifest, link: ChainLink | None = None, *, lost: str = "", unproven_end: int = 0
) -> ManifestProof:
    """Return what proves an inner manifest."""
    return ManifestProof(
        manifest.epoch,
        manifest.as_of_seq,
        _rest(manifest),
        "" if link is None else link.digest.hex(),
        0 if link is None else link.run,
        lost,
        unproven_end,
    )


def _rest(manifest: Manifest) -> str:
    counters = sorted(manifest.counters.items())
    return _sha256(msgspec.json.encode((manifest.format, counters, manifest.base)))


def require_proven(manifest: Manifest, proof: ManifestProof) -> None:
    """See that an inner manifest is the one that was written.

    Raises:
        CorruptRecordError: It is not.

    """
    there = (manifest.epoch, manifest.as_of_seq, _rest(manifest))
    if there != (proof.epoch, proof.as_of_seq, proof.rest):
        message = f"the manifest of {manifest.key} was changed without the key"
        raise CorruptRecordError(message, key=str(manifest.key))


def facts_of(proof: ManifestProof) -> Facts:
    """Return what a manifest proves of its log."""
    digest = bytes.fromhex(proof.digest)
    link = ChainLink(proof.as_of_seq, digest, proof.run) if digest else None
    end = proof.unproven_end or (proof.as_of_seq if proof.lost else 0)
    return Facts(proof.as_of_seq, proof.epoch, link, bool(proof.lost), end)


def unproven_tail(key: SessionKey, end: int = 0, why: str = "") -> str:
    """Say that a log may have been longer, as far as anybody knows."""
    said = f"was lost or forged when it ended at record {end}" if end else f"proves nothing ({why})"
    where = f"record {end}" if end else "its end"
    return (
        f"the log of {key} may be incomplete: its manifest {said}, and whether records behind "
        f"{where} were cut off before that cannot be known"
    )


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
    seal: Transform,
    proof: ManifestProof | None = None,
) -> Manifest:
    """Return what the inner store is given.

    Args:
        manifest: The engine's.
        sealed: The documents that are written now.
        before: The inner manifest until now, which knows the others.
        own: The wrapper's own documents.
        seal: The tenant's.
        proof: What proves the manifest, where the session is chained.

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
    return sealed_in(
        msgspec.structs.replace(manifest, documents=documents),
        HiddenManifest(about, manifest.documents, proof),
        seal,
    )


def sealed_in(manifest: Manifest, hidden: HiddenManifest, seal: Transform) -> Manifest:
    """Return an inner manifest with what it hides."""
    about = hidden.about
    payload = seal.seal_payload(place_of(manifest.key), msgspec.json.encode(hidden))
    return msgspec.structs.replace(
        manifest,
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


def outer_of(inner: Manifest, hidden: HiddenManifest) -> Manifest:
    """Return the engine's manifest."""
    return msgspec.structs.replace(inner, documents=hidden.documents, about=hidden.about)


def listed(info: SessionInfo, seal: Transform | None) -> SessionInfo:
    """Return a listing's line as it was before it was sealed; what is damaged stays unsaid."""
    if not is_ours(info.title):
        return info
    try:
        about = _hidden(info.key, info.title, seal).about
    except CorruptRecordError:
        about = About()
    return msgspec.structs.replace(info, title=about.title, owner=about.owner, tags=about.tags)


def hidden_in(inner: Manifest, seal: Transform | None) -> HiddenManifest:
    """Return what an inner manifest hides.

    Raises:
        CorruptRecordError: It is damaged, or the manifest around it was changed.

    """
    hidden = _hidden(inner.key, inner.about.title, seal)
    if hidden.proof is not None:
        require_proven(inner, hidden.proof)
    return hidden


def _hidden(key: SessionKey, title: str | None, seal: Transform | None) -> HiddenManifest:
    message = f"the manifest of {key} is damaged: restore it from a copy"
    if seal is None or title is None:
        raise CorruptRecordError(message, key=str(key))
    opened = seal.open_payload(place_of(key), title.removeprefix(_MARK).encode())
    try:
        return decode(opened, HiddenManifest)
    except FormatError as error:
        raise CorruptRecordError(message, key=str(key)) from error


def unfit(manifest: Manifest, documents: Mapping[str, bytes]) -> Collection[str]:
    """Return the documents whose bytes are not those that the manifest lists."""
    return [
        name
        for name, data in documents.items()
        if name in manifest.documents and _sha256(data) != manifest.documents[name].sha256
    ]


def sealed_document(
    seal: Transform, name: str, data: bytes, proof: ManifestProof | None, as_of: int
) -> bytes:
    """Return a document sealed; a proven one to the record that it is as of, as well."""
    if proof is None:
        return seal.seal(("document", name), data)
    return seal.seal(("folded", name), as_of.to_bytes(8, "big") + data)


def opened_documents(
    seal: Transform, sealed: Mapping[str, Document], hidden: HiddenManifest
) -> dict[str, Document]:
    """Return documents opened, but for those that are damaged, or are not of this fold.

    One of a newer fold is good, too: somebody was killed before he had written its manifest.
    """
    found: dict[str, Document] = {}
    for name, one in sealed.items():
        with suppress(CorruptRecordError):
            data, as_of = _opened(seal, name, one, hidden)
            listed = hidden.documents.get(name)
            if hidden.proof is not None and (
                listed is None or (listed.sha256 != _sha256(data) and not as_of > listed.as_of_seq)
            ):
                continue
            found[name] = Document(data, one.as_of_seq)
    return found


def _opened(seal: Transform, name: str, one: Document, hidden: HiddenManifest) -> tuple[bytes, int]:
    """Return a document, and the record that its seal proves it to be as of, 0 for none."""
    if hidden.proof is not None:
        with suppress(CorruptRecordError):
            data = seal.open(("folded", name), one.data)
            as_of = int.from_bytes(data[:8], "big")
            return data[8:], as_of if as_of == one.as_of_seq else 0
    return seal.open(("document", name), one.data), 0  # maybe of before there were proofs


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
