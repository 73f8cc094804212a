"""Documents and manifests of a session: folded files, and the manifests that make them valid.

A fold makes ``manifest-<epoch>.next`` durable, then the documents, then renames the former to
``manifest-<epoch>.json``. So a document that is read matches one of the manifests on disk, and
is used with that manifest's ``as_of_seq``; one that matches none is damaged. A kill after any
step loses nothing: the log has all of it. A manifest that fails its own checksum counts as lost.

Blocking: each function is part of one call into a thread.
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
    dead_letters_generation,
    document_path,
    encode_name,
    inbox_generation,
    manifest_epoch,
    manifest_name,
    next_manifest_name,
    segment_of,
    start_of,
)
from perdure.stores.file.sealed import sealed, unsealed
from perdure.stores.file.segments import require_key

_log = logging.getLogger("perdure")
_warned = LogOnce()

_MAX_REREADS = 100
"""How many concurrent folds in a row a reader retries before it reports what it read."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A manifest file that passed its checksum."""

    manifest: Manifest
    is_pending: bool
    """Whether the fold that it announces had not finished."""


class _Format(msgspec.Struct):
    format: int


def read_manifests(folder: Folder, key: SessionKey, *, since: int = 0) -> list[ManifestFile]:
    """Return the manifests of a session's current generation: completed ones first, by epoch.

    Raises:
        UnsupportedVersionError: A manifest has a newer format.
        CorruptRecordError: A manifest belongs to another session.

    """
    files: dict[tuple[str, bool], bytes | None] = {}
    for _ in range(_MAX_REREADS):
        files = {
            (name, parsed[1]): folder.read(name)
            for name in folder.names()
            if (parsed := manifest_epoch(name)) is not None and parsed[0] >= since
        }
        # A file that vanished since the listing may have been renamed to one read before it.
        if None not in files.values():
            break
    manifests = []
    for (name, is_pending), data in files.items():
        manifest = None if data is None else _manifest_of(folder, name, data, key)
        if manifest is not None:
            manifests.append(ManifestFile(manifest, is_pending))
    return sorted(manifests, key=lambda file: (file.is_pending, -file.manifest.epoch))


def require_folded(
    folder: Folder, key: SessionKey, manifests: list[ManifestFile], head: int
) -> None:
    """Raise CorruptRecordError if the log ends before what was folded: then files are missing."""
    folded = max((file.manifest.as_of_seq for file in manifests), default=0)
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
        if _warned.first((path, data)):
            message = "the manifest of session %s is damaged: %s; it is rebuilt from the log"
            _log.warning(message, key, path, extra={"session": str(key), "path": path})
    else:
        require_key(path, manifest.key, key)
    return manifest


def read(
    folder: Folder, key: SessionKey, names: Collection[str] | None, *, since: int = 0
) -> Documents:
    """Read documents, consistently even while the holder folds."""
    manifests = read_manifests(folder, key, since=since)
    result = _match(folder, manifests, names)
    for _ in range(_MAX_REREADS):
        if not result.damaged:
            break
        # A fold announces itself before it touches a document; otherwise this is damage.
        reread = read_manifests(folder, key, since=since)
        if reread == manifests:
            break
        manifests, result = reread, _match(folder, reread, names)
    is_damaged = result.manifest is None and has_damaged_manifest(folder, since)
    if is_damaged or (result.manifest is None and names is None):
        unlisted = [name for name in _names_on_disk(folder, names) if name not in result.found]
        # A wrapper keeps its keys in folders, and needs them even without a manifest.
        in_folders = {name: _bytes_of(folder, name) for name in unlisted if "/" in name}
        readable = {name: data for name, data in in_folders.items() if data is not None}
        damaged = tuple(unlisted) if is_damaged else ()  # a first fold may have been killed
        return msgspec.structs.replace(result, damaged=damaged, remains=readable)
    return result


def has_damaged_manifest(folder: Folder, since: int) -> bool:
    """Return whether a manifest is damaged, so that it is unknown what was folded."""
    names = [name for name in folder.names() if (manifest_epoch(name) or (-1,))[0] >= since]
    contents = [folder.read(name) for name in names]
    return any(data is not None and unsealed(data, Manifest) is None for data in contents)


def _names_on_disk(folder: Folder, names: Collection[str] | None) -> list[str]:
    """Return which documents exist on disk, valid or not; for None, down to one folder deep."""
    if names is not None:
        return [name for name in names if _bytes_of(folder, name) is not None]
    entries = list(filter(str.isascii, folder.names()))  # as all of perdure's names are
    for subfolder in [name for name in entries if document_path(f"{name}/x")[0] == name]:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            folder.enter(subfolder) as inner,
        ):
            entries += [f"{subfolder}/{name}" for name in filter(str.isascii, inner.names())]
    ends = (".json", ".jsonl")
    return [
        name for name in entries if name.endswith(ends) and "/".join(document_path(name)) == name
    ]


def _match(
    folder: Folder, manifests: list[ManifestFile], names: Collection[str] | None
) -> Documents:
    current = manifests[0].manifest if manifests and not manifests[0].is_pending else None
    listed = dict.fromkeys(name for file in manifests for name in file.manifest.documents)
    documents: dict[str, Document] = {}
    damaged = []
    for name in listed if names is None else [name for name in listed if name in names]:
        document = _document(folder, name, manifests)
        if document is not None and (current is None or name in current.documents):
            documents[name] = document
        elif current is not None and name in current.documents:
            damaged.append(name)
    return Documents(current, documents, tuple(damaged))


def _document(folder: Folder, name: str, manifests: list[ManifestFile]) -> Document | None:
    data = _bytes_of(folder, name)
    if data is None:
        return None
    digest = hashlib.sha256(data).hexdigest()
    for file in manifests:
        folded = file.manifest.documents.get(name)
        if folded is not None and folded.sha256 == digest:
            return Document(data, folded.as_of_seq)
    return None


def _bytes_of(folder: Folder, name: str) -> bytes | None:
    *steps, last = document_path(name)
    try:
        with folder.enter(*steps) as parent:
            return parent.read(last)
    except FileNotFoundError:
        return None


def write(
    folder: Folder,
    documents: Mapping[str, bytes],
    manifest: Manifest,
    require_held: Callable[[], None],
) -> None:
    """Make documents durable, then the manifest that lists them, then clean up.

    *require_held* raises when another holder has acquired the session.
    """
    require_held()
    pending = next_manifest_name(manifest.epoch)
    folder.replace(pending, sealed(manifest))
    folder.sync()
    by_folder: dict[tuple[str, ...], list[tuple[str, bytes]]] = {}
    for name, data in documents.items():
        *steps, last = document_path(name)
        by_folder.setdefault(tuple(steps), []).append((last, data))
    for path, files in by_folder.items():
        with folder.make(*path) as parent:
            for last, data in files:
                parent.replace(last, data)
            parent.sync()
    require_held()
    previous = {
        name
        for file in _replaced_manifests(folder, manifest.key)
        for name in file.manifest.documents
    }
    folder.rename(pending, manifest_name(manifest.epoch))
    folder.sync()
    _remove_documents(folder, previous - manifest.documents.keys())
    for name in folder.names():
        parsed = manifest_epoch(name)
        if parsed is not None and parsed[0] < manifest.epoch:
            _quarantine_if_damaged(folder, name)
            folder.remove(name)


def _quarantine_if_damaged(folder: Folder, manifest: str) -> None:
    data = folder.read(manifest)
    if data is not None and unsealed(data, Manifest) is None:
        _quarantine(folder, manifest, data)


def _replaced_manifests(folder: Folder, key: SessionKey) -> list[ManifestFile]:
    """Return the manifests that are about to be replaced; one of a newer format does not block."""
    try:
        return read_manifests(folder, key)
    except UnsupportedVersionError:
        return []


def _remove_documents(folder: Folder, names: Collection[str]) -> None:
    for name in names:
        *steps, last = document_path(name)
        with contextlib.suppress(FileNotFoundError):
            with folder.enter(*steps) as parent:
                parent.remove(last)
            if steps:
                folder.remove_folder(steps[0])


def quarantine_damaged(folder: Folder, key: SessionKey, names: Collection[str]) -> None:
    """Copy damaged documents to quarantine before the next fold; only for the holder."""
    for name in names:
        data = _bytes_of(folder, name)
        path = f"{folder.path}/{name}"
        if _warned.first((path, data)):
            message = "a document of session %s is damaged: %s; it is rebuilt from the log"
            facts = {"session": str(key), "path": path, "bytes": len(data or b"")}
            _log.warning(message, key, path, extra=facts)
        if data is not None:
            _quarantine(folder, name, data)


def _quarantine(folder: Folder, name: str, data: bytes) -> None:
    copy = f"{encode_name(name)}.{hashlib.sha256(data).hexdigest()[:12]}"
    # Best effort: even on a full disk, the log rebuilds what was folded.
    with contextlib.suppress(OSError), folder.make(QUARANTINE) as quarantine:
        if not quarantine.has(copy):
            quarantine.replace(copy, data)


def remove_unfinished(folder: Folder, key: SessionKey) -> None:
    """Remove files that killed holders left unfinished; only for the holder."""
    listed = (name for file in _replaced_manifests(folder, key) for name in file.manifest.documents)
    for path in {(), (QUARANTINE,), *(document_path(name)[:-1] for name in listed)}:
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as inner:
            inner.remove_temporary()


def remove_owned(folder: Folder, key: SessionKey, *, below: int, evidence: bool) -> None:
    """Remove the files of epochs below *below*: documents, manifests, segments and posts.

    An explicit list: other files in the folder are not perdure's. Bounded by epoch, so that a
    deleter that was suspended cannot touch the log of a later generation. With *evidence*,
    quarantined copies are removed as well.
    """
    remove_unfinished(folder, key)
    dead = {name for name in folder.names() if (manifest_epoch(name) or (below,))[0] < below}
    if dead:
        ours, later = set[str](), set[str]()
        for file in _replaced_manifests(folder, key):
            (ours if file.manifest.epoch < below else later).update(file.manifest.documents)
        if any(unsealed(folder.read(name) or b"", Manifest) is None for name in dead):
            # A damaged manifest may have listed any of them.
            ours.update(_names_on_disk(folder, None))
        _remove_documents(folder, ours - later)
    for name in dead:
        folder.remove(name)
    _remove_files(
        folder, LOG, lambda name: (segment_of(name) or start_of(name) or (below,))[0] < below
    )
    for name in folder.names():
        if 0 < (inbox_generation(name) or dead_letters_generation(name)) < below:
            _remove_files(folder, name, lambda _: True)
    if evidence:
        _remove_files(folder, QUARANTINE, lambda _: True)


def _remove_files(folder: Folder, step: str, is_ours: Callable[[str], bool]) -> None:
    with contextlib.suppress(FileNotFoundError):
        with folder.enter(step) as inner:
            for name in filter(is_ours, inner.names()):
                inner.remove(name)
        folder.remove_folder(step)
