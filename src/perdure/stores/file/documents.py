"""Small files of our own: JSON with a checksum, read as a value or not at all.

A file that is torn, damaged, or of another shape than this release writes is None to its
reader, who knows what the lack of it means. What lies on a disk is data: nothing in it can
raise anything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from perdure._lib.files import Folder
from perdure._lib.logs import LogOnce
from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Manifest
from perdure.store import Document, Documents
from perdure.stores.file.layout import (
    LOG,
    QUARANTINE,
    dead_letters_life,
    document_path,
    encode_name,
    inbox_life,
    manifest_epoch,
    manifest_name,
    next_manifest_name,
    segment_of,
    start_of,
)
from perdure.stores.file.sealed import sealed, unsealed
from perdure.stores.file.segments import require_key

# Small files of our own: JSON with a checksum, read as a value or not at all


# Documents and manifests: folded files, and the files that say which of them count
#
# A fold makes ``manifest-<epoch>.next`` durable, then the documents, then turns it into
# ``manifest-<epoch>.json`` by a rename. So a document that is read matches one of the manifests
# that lie there, and is used with that one's ``as_of_seq``; one that matches none is damaged. A
# kill after any step loses nothing: the log has it all.
# Manifests carry a checksum of their own, and one that fails it counts as lost. Blocking; each
# function is part of one hop into a thread.


_log = logging.getLogger("perdure")
_told = LogOnce()

_TRIES = 100
"""How many folds a reader may meet in a row before it reports what it saw."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A manifest file, sound."""

    manifest: Manifest
    coming: bool
    """Whether the fold that it announces had not ended."""


class _Format(msgspec.Struct):
    format: int


def read_manifests(folder: Folder, key: SessionKey, *, since: int = 0) -> list[ManifestFile]:
    """Return the manifests of a session's present life, the newest that counts first.

    Raises:
        UnsupportedVersionError: One has a newer format.
        CorruptRecordError: One belongs to another session.

    """
    files: dict[tuple[str, bool], bytes | None] = {}
    for _ in range(_TRIES):
        files = {
            (name, found[1]): folder.read(name)
            for name in folder.names()
            if (found := manifest_epoch(name)) is not None and found[0] >= since
        }
        # One that is gone since it was listed may have become one that was read before that.
        if None not in files.values():
            break
    seen = []
    for (name, coming), data in files.items():
        manifest = None if data is None else _manifest_of(folder, name, data, key)
        if manifest is not None:
            seen.append(ManifestFile(manifest, coming))
    return sorted(seen, key=lambda one: (one.coming, -one.manifest.epoch))


def require_folded(folder: Folder, key: SessionKey, seen: list[ManifestFile], head: int) -> None:
    """Raise CorruptRecordError if the log ends before what was folded: then it lacks files."""
    folded = max((one.manifest.as_of_seq for one in seen), default=0)
    if folded > head:
        message = (
            f"the log of {key} in {folder.path} ends at record {head}, but documents were made "
            f"from record {folded}: files of its log are missing or cut; restore them from a copy"
        )
        raise CorruptRecordError(message, path=folder.path, head=head, as_of_seq=folded)


def _manifest_of(folder: Folder, name: str, data: bytes, key: SessionKey) -> Manifest | None:
    path = f"{folder.path}/{name}"
    number = unsealed(data, _Format)
    if number is not None and number.format > FORMAT:
        message = (
            f"{path} has format {number.format}, this release reads up to {FORMAT}: use a newer "
            "release of perdure"
        )
        raise UnsupportedVersionError(message, path=path, format=number.format)
    manifest = unsealed(data, Manifest)
    if manifest is None:
        if _told.first((path, data)):
            message = "the manifest of session %s is damaged: %s; it is made anew from the log"
            _log.warning(message, key, path, extra={"session": str(key), "path": path})
    else:
        require_key(path, manifest.key, key)
    return manifest


def read(
    folder: Folder, key: SessionKey, names: Collection[str] | None, *, since: int = 0
) -> Documents:
    """Read documents, beside whoever folds meanwhile."""
    seen = read_manifests(folder, key, since=since)
    found = _match(folder, seen, names)
    for _ in range(_TRIES):
        if not found.damaged:
            break
        # A fold announces itself before it touches a document: else this is damage.
        again = read_manifests(folder, key, since=since)
        if again == seen:
            break
        seen, found = again, _match(folder, again, names)
    is_damaged = found.manifest is None and has_damaged_manifest(folder, since)
    if is_damaged or (found.manifest is None and names is None):
        lost = [name for name in _lying(folder, names) if name not in found.found]
        # A wrapper keeps its keys in folders, and needs them without a manifest too.
        deep = {name: _bytes_of(folder, name) for name in lost if "/" in name}
        remains = {name: data for name, data in deep.items() if data is not None}
        damaged = tuple(lost) if is_damaged else ()  # a first fold may have been killed
        return msgspec.structs.replace(found, damaged=damaged, remains=remains)
    return found


def has_damaged_manifest(folder: Folder, since: int) -> bool:
    """Say whether what was folded cannot be told any more."""
    names = [name for name in folder.names() if (manifest_epoch(name) or (-1,))[0] >= since]
    found = [folder.read(name) for name in names]
    return any(data is not None and unsealed(data, Manifest) is None for data in found)


def _lying(folder: Folder, names: Collection[str] | None) -> list[str]:
    """Return which documents lie there, whatever they are; of all, none in a folder's folder."""
    if names is not None:
        return [name for name in names if _bytes_of(folder, name) is not None]
    there = list(filter(str.isascii, folder.names()))  # as all of our names are
    for place in [name for name in there if document_path(f"{name}/x")[0] == name]:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            folder.enter(place) as deep,
        ):
            there += [f"{place}/{name}" for name in filter(str.isascii, deep.names())]
    ends = (".json", ".jsonl")
    return [name for name in there if name.endswith(ends) and "/".join(document_path(name)) == name]


def _match(folder: Folder, seen: list[ManifestFile], names: Collection[str] | None) -> Documents:
    current = seen[0].manifest if seen and not seen[0].coming else None
    listed = dict.fromkeys(name for one in seen for name in one.manifest.documents)
    found: dict[str, Document] = {}
    damaged = []
    for name in listed if names is None else [name for name in listed if name in names]:
        document = _document(folder, name, seen)
        if document is not None and (current is None or name in current.documents):
            found[name] = document
        elif current is not None and name in current.documents:
            damaged.append(name)
    return Documents(current, found, tuple(damaged))


def _document(folder: Folder, name: str, seen: list[ManifestFile]) -> Document | None:
    data = _bytes_of(folder, name)
    if data is None:
        return None
    digest = hashlib.sha256(data).hexdigest()
    for one in seen:
        folded = one.manifest.documents.get(name)
        if folded is not None and folded.sha256 == digest:
            return Document(data, folded.as_of_seq)
    return None


def _bytes_of(folder: Folder, name: str) -> bytes | None:
    *steps, last = document_path(name)
    try:
        with folder.enter(*steps) as place:
            return place.read(last)
    except FileNotFoundError:
        return None


def write(
    folder: Folder,
    documents: Mapping[str, bytes],
    manifest: Manifest,
    require_mine: Callable[[], None],
) -> None:
    """Make documents durable, then the manifest that names them, then tidy up.

    *require_mine* raises when the session is another holder's by now.
    """
    require_mine()
    coming = next_manifest_name(manifest.epoch)
    folder.replace(coming, sealed(manifest))
    folder.sync()
    places: dict[tuple[str, ...], list[tuple[str, bytes]]] = {}
    for name, data in documents.items():
        *steps, last = document_path(name)
        places.setdefault(tuple(steps), []).append((last, data))
    for path, files in places.items():
        with folder.make(*path) as place:
            for last, data in files:
                place.replace(last, data)
            place.sync()
    require_mine()
    before = {name for one in _others(folder, manifest.key) for name in one.manifest.documents}
    folder.rename(coming, manifest_name(manifest.epoch))
    folder.sync()
    _remove_documents(folder, before - manifest.documents.keys())
    for name in folder.names():
        found = manifest_epoch(name)
        if found is not None and found[0] < manifest.epoch:
            _keep_if_damaged(folder, name)
            folder.remove(name)


def _keep_if_damaged(folder: Folder, manifest: str) -> None:
    data = folder.read(manifest)
    if data is not None and unsealed(data, Manifest) is None:
        _keep(folder, manifest, data)


def _others(folder: Folder, key: SessionKey) -> list[ManifestFile]:
    """Return the manifests that are about to be replaced; one of no use is no hindrance."""
    try:
        return read_manifests(folder, key)
    except UnsupportedVersionError:
        return []


def _remove_documents(folder: Folder, names: Collection[str]) -> None:
    for name in names:
        *steps, last = document_path(name)
        with contextlib.suppress(FileNotFoundError):
            with folder.enter(*steps) as place:
                place.remove(last)
            if steps:
                folder.remove_folder(steps[0])


def keep_evidence(folder: Folder, key: SessionKey, names: Collection[str]) -> None:
    """Copy damaged documents out of the next fold's way; only for the holder."""
    for name in names:
        data = _bytes_of(folder, name)
        path = f"{folder.path}/{name}"
        if _told.first((path, data)):
            message = "a document of session %s is damaged: %s; it is made anew from the log"
            facts = {"session": str(key), "path": path, "bytes": len(data or b"")}
            _log.warning(message, key, path, extra=facts)
        if data is not None:
            _keep(folder, name, data)


def _keep(folder: Folder, name: str, data: bytes) -> None:
    copy = f"{encode_name(name)}.{hashlib.sha256(data).hexdigest()[:12]}"
    # A help, not a duty: on a full disk, what was folded is made again from the log all the same.
    with contextlib.suppress(OSError), folder.make(QUARANTINE) as quarantine:
        if not quarantine.has(copy):
            quarantine.replace(copy, data)


def remove_unfinished(folder: Folder, key: SessionKey) -> None:
    """Remove what killed holders left half-written; only for the holder."""
    listed = (name for one in _others(folder, key) for name in one.manifest.documents)
    for path in {(), (QUARANTINE,), *(document_path(name)[:-1] for name in listed)}:
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as place:
            place.remove_temporary()


def remove_owned(folder: Folder, key: SessionKey, *, below: int, evidence: bool) -> None:
    """Remove what the epochs below *below* left: documents, manifests, segments and posts.

    An explicit list: what else lies in the folder is not ours. Bounded by epoch, so that a
    deleter who overslept cannot touch the log of a later life. *evidence* takes what was
    put into quarantine as well.
    """
    remove_unfinished(folder, key)
    dead = {name for name in folder.names() if (manifest_epoch(name) or (below,))[0] < below}
    if dead:
        ours, later = set[str](), set[str]()
        for one in _others(folder, key):
            (ours if one.manifest.epoch < below else later).update(one.manifest.documents)
        if any(unsealed(folder.read(name) or b"", Manifest) is None for name in dead):
            ours.update(_lying(folder, None))  # a damaged one may have listed any of them
        _remove_documents(folder, ours - later)
    for name in dead:
        folder.remove(name)
    _remove_files(
        folder, LOG, lambda name: (segment_of(name) or start_of(name) or (below,))[0] < below
    )
    for name in folder.names():
        if 0 < (inbox_life(name) or dead_letters_life(name)) < below:
            _remove_files(folder, name, lambda _: True)
    if evidence:
        _remove_files(folder, QUARANTINE, lambda _: True)


def _remove_files(folder: Folder, step: str, is_ours: Callable[[str], bool]) -> None:
    with contextlib.suppress(FileNotFoundError):
        with folder.enter(step) as place:
            for name in filter(is_ours, place.names()):
                place.remove(name)
        folder.remove_folder(step)
