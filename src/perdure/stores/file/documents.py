"""Documents, manifests and blobs: folded files, what makes them valid, and files by content.

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
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from perdure._lib.files import TEMPORARY, Folder
from perdure._lib.logs import LogOnce
from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.chunks import is_name, require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, FoldedDocument, Manifest, decode_manifest
from perdure.records.records import open_sealed
from perdure.store import BlobSweep, Document, Documents
from perdure.stores.file.layout import (
    LOG,
    QUARANTINE,
    blobs_of,
    dead_letters_generation,
    document_path,
    encode_name,
    inbox_generation,
    labels_epoch,
    labels_name,
    manifest_epoch,
    manifest_name,
    next_manifest_name,
    sealed,
    segment_of,
    start_of,
    unsealed,
)
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


def read_manifests(
    folder: Folder, key: SessionKey, *, since: int = 0, names: Collection[str] | None = None
) -> list[ManifestFile]:
    """Return the manifests of a session's current generation: completed ones first, by epoch.

    *names* are those in the folder, if they were listed already.

    Raises:
        UnsupportedVersionError: A manifest has a newer format.
        CorruptRecordError: A manifest belongs to another session.

    """
    files: dict[tuple[str, bool], bytes | None] = {}
    for _ in range(_MAX_REREADS):
        files = {
            (name, parsed[1]): folder.read(name)
            for name in (folder.names() if names is None else names)
            if (parsed := manifest_epoch(name)) is not None and parsed[0] >= since
        }
        names = None
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
        raise CorruptRecordError(
            f"the log of {key} in {folder.path} ends at record {head}, but documents were made "
            f"from record {folded}: files of its log are missing or cut; restore them from a copy",
            path=folder.path,
            head=head,
            as_of_seq=folded,
        )


def _manifest_of(folder: Folder, name: str, data: bytes, key: SessionKey) -> Manifest | None:
    path = f"{folder.path}/{name}"
    manifest = decode_manifest(open_sealed(data), path, path=path)
    if manifest is None:
        if _warned.first((path, data)):
            message = "the manifest of session %s is damaged: %s; it is rebuilt from the log"
            _log.warning(message, key, path, extra={"session": str(key), "path": path})
    else:
        require_key(path, manifest.key, key)
    return manifest


def read(
    folder: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    *,
    since: int = 0,
    manifests: list[ManifestFile] | None = None,
    listed: Collection[str] | None = None,
) -> Documents:
    """Read documents, consistently even while the holder folds.

    *manifests* are those of the folder, and *listed* its names, if they were read already.
    """
    manifests = read_manifests(folder, key, since=since) if manifests is None else manifests
    result = _match(folder, manifests, names)
    for _ in range(_MAX_REREADS):
        if not result.damaged:
            break
        # A fold announces itself before it touches a document; otherwise this is damage.
        reread = read_manifests(folder, key, since=since)
        if reread == manifests:
            break
        manifests, result = reread, _match(folder, reread, names)
    is_damaged = result.manifest is None and has_damaged_manifest(folder, since, listed)
    if is_damaged or (result.manifest is None and names is None):
        unlisted = [name for name in _names_on_disk(folder, names) if name not in result.found]
        # A wrapper keeps its keys in folders, and needs them even without a manifest.
        in_folders = {name: _bytes_of(folder, name) for name in unlisted if "/" in name}
        readable = {name: data for name, data in in_folders.items() if data is not None}
        damaged = tuple(unlisted) if is_damaged else ()  # a first fold may have been killed
        return msgspec.structs.replace(result, damaged=damaged, remains=readable)
    return result


def has_damaged_manifest(folder: Folder, since: int, listed: Collection[str] | None = None) -> bool:
    """Return whether a manifest is damaged, so that it is unknown what was folded."""
    listed = folder.names() if listed is None else listed
    names = [name for name in listed if (manifest_epoch(name) or (-1,))[0] >= since]
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
    if current is not None:  # a document that is just being replaced is newer than it says
        newer = {
            name: FoldedDocument.of(document.as_of_seq, document.data)
            for name, document in documents.items()
            if document.as_of_seq != current.documents[name].as_of_seq
        }
        current = msgspec.structs.replace(current, documents={**current.documents, **newer})
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


def remove_unfinished(folder: Folder, manifests: Collection[ManifestFile]) -> None:
    """Remove files that killed holders left unfinished; only for the holder."""
    listed = (name for file in manifests for name in file.manifest.documents)
    for path in {(), (QUARANTINE,), *(document_path(name)[:-1] for name in listed)}:
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as inner:
            inner.remove_temporary()


def remove_owned(
    folder: Folder, key: SessionKey, *, below: int, evidence: bool, inbox: int = 0
) -> None:
    """Remove the files of epochs below *below*: documents, manifests, segments and dead letters;
    and posts, those of the generation *inbox* and later excepted.

    An explicit list: other files in the folder are not perdure's. Bounded by epoch, so that a
    deleter that was suspended cannot touch the log of a later generation. With *evidence*,
    quarantined copies are removed as well.
    """
    remove_unfinished(folder, _replaced_manifests(folder, key))
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
    remove_labels(folder, below)
    for name in folder.names():
        if (
            0 < inbox_generation(name) < (inbox or below)
            or 0 < dead_letters_generation(name) < below
        ):
            _remove_files(folder, name, lambda _: True)
    if evidence:
        _remove_files(folder, QUARANTINE, lambda _: True)


# Labels that a listing shows: those of the last save that changed them


class SavedLabels(msgspec.Struct, frozen=True):
    """Content of ``labels-<epoch>.json``."""

    seq: int
    """The record that they are as of: a fold as of a later one knows better."""
    about: About


def save_labels(folder: Folder, epoch: int, seq: int, about: About) -> None:
    """Keep labels for listings. They are in the log: it need not be durable, nor work."""
    with contextlib.suppress(OSError):
        folder.replace(labels_name(epoch), sealed(SavedLabels(seq, about)), durable=False)
        remove_labels(folder, epoch)


def remove_labels(folder: Folder, below: int) -> None:
    """Remove the labels that holders of epochs below *below* saved."""
    for name in folder.names():
        if 0 < labels_epoch(name) < below:
            folder.remove(name)


def read_labels(folder: Folder, names: Collection[str], since: int) -> SavedLabels | None:
    """Return the newest labels of a session's generation; None without any."""
    epoch = max(map(labels_epoch, names), default=0)
    data = folder.read(labels_name(epoch)) if epoch >= since else None
    return unsealed(data, SavedLabels)


def _remove_files(folder: Folder, step: str, is_ours: Callable[[str], bool]) -> None:
    with contextlib.suppress(FileNotFoundError):
        with folder.enter(step) as inner:
            for name in filter(is_ours, inner.names()):
                inner.remove(name)
        folder.remove_folder(step)


# Blobs: content-addressed files, shared by a tenant's sessions


_SHARD = re.compile(r"[0-9a-fx][0-9a-f]\Z")


def put(root: Folder, tenant: str, blobs: Mapping[str, bytes], now: float) -> None:
    """Make blobs durable.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    require_named(blobs)
    if not blobs:
        return
    path = blobs_of(tenant)
    with root.make(*path) as folder:
        for prefix in sorted({name[:2] for name in blobs}):
            with folder.make(prefix) as shard:
                for name in [name for name in blobs if name[:2] == prefix]:
                    _put(folder, shard, name, blobs[name], now)
                # The process that put it first may have died before its name was durable.
                shard.sync()
        folder.sync()
    root.sync_path(*path)


def _put(folder: Folder, shard: Folder, name: str, data: bytes, now: float) -> None:
    for moved in _quarantined(folder, name):
        with moved:
            if moved.read(name) == data:
                moved.rename(name, name, to=shard)
            else:
                moved.remove(name)
    if shard.read(name) == data:
        with contextlib.suppress(FileNotFoundError):  # a sweep has just moved it
            shard.touch(name, now)
            return
    shard.replace(name, data)


def get(root: Folder, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if it does not exist.

    Raises:
        CorruptRecordError: Its bytes do not match its name.

    """
    if not is_name(name):
        return None
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return None
    with folder:
        data = _read(folder, name)
        path = f"{folder.path}/{name[:2]}/{name}"
        return None if data is None else verified(name, data, at=path)


def _read(folder: Folder, name: str) -> bytes | None:
    for _ in range(2):  # a sweep may move it between the two reads
        with contextlib.suppress(FileNotFoundError), folder.enter(name[:2]) as shard:
            data = shard.read(name)
            if data is not None:
                return data
        for moved in _quarantined(folder, name):
            with moved:
                data = moved.read(name)
            if data is not None:
                return data
    return None


def _quarantined(folder: Folder, name: str) -> Iterator[Folder]:
    """Yield the quarantine folders that hold a blob; the caller closes each."""
    for stamp in _stamps(folder):
        with contextlib.suppress(FileNotFoundError):
            moved = folder.enter(QUARANTINE, str(stamp))
            if moved.stat(name) is None:
                moved.close()
            else:
                yield moved


def _stamps(folder: Folder) -> list[int]:
    try:
        with folder.enter(QUARANTINE) as quarantine:
            return sorted(int(name) for name in quarantine.names() if name.isdecimal())
    except FileNotFoundError:
        return []


def blob_names(root: Folder, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return []
    with folder:
        return sorted(
            {n for blob_folder in _blob_folders(folder) for n in blob_folder.names() if is_name(n)}
        )


def renew(root: Folder, tenant: str, names: Collection[str], now: float) -> set[str]:
    """Make blobs young, also those that a sweep has moved; return those that do not exist."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return set(names)
    with folder:
        return {name for name in names if not (is_name(name) and _renew(folder, name, now))}


def _renew(folder: Folder, name: str, now: float) -> bool:
    while True:  # each turn meets another sweep
        with contextlib.suppress(FileNotFoundError), folder.enter(name[:2]) as shard:
            shard.touch(name, now)
            return True
        is_moved = False
        for moved in _quarantined(folder, name):
            with moved:
                _bring_back(folder, moved, name)
            is_moved = True
        if not is_moved and not _is_in_shard(folder, name):
            return False


def _is_in_shard(folder: Folder, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError), folder.enter(name[:2]) as shard:
        return shard.has(name)
    return False


def remove_blobs(root: Folder, tenant: str, names: Collection[str]) -> int:
    """Remove blobs, from quarantine too, and return how many bytes were freed."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return 0
    freed = 0
    with folder:
        for blob_folder in _blob_folders(folder):
            for name in filter(is_name, blob_folder.names()):
                status = blob_folder.stat(name) if name in names else None
                if status is not None and blob_folder.remove(name):
                    freed += status.st_size
            blob_folder.sync()
    return freed


def _blob_folders(folder: Folder) -> Iterator[Folder]:
    """Yield the folders that hold blobs, quarantine's too; each is closed after its turn."""
    steps = [(shard,) for shard in folder.names() if _SHARD.match(shard)]
    for path in (*steps, *((QUARANTINE, str(stamp)) for stamp in _stamps(folder))):
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as blob_folder:
            yield blob_folder


class _Swept(msgspec.Struct, frozen=True):
    """What a sweep looks at, and leaves."""

    keep: frozenset[str]
    among: frozenset[str] | None
    """None for all."""
    older_than: float
    now: float

    def looks_at(self, name: str) -> bool:
        return self.among is None or name in self.among


def sweep(
    root: Folder,
    tenant: str,
    reachable: Collection[str],
    older_than: float,
    now: float,
    among: Collection[str] | None = None,
) -> BlobSweep:
    """Remove blobs that were quarantined long enough ago, then quarantine unreachable ones."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return BlobSweep()
    looked_at = None if among is None else frozenset(among)
    swept = _Swept(frozenset(reachable), looked_at, older_than, now)
    with folder:
        sizes = [size for stamp in _stamps(folder) for size in _expire(folder, stamp, swept)]
        moved = _move_away(folder, swept)
    return BlobSweep(moved, len(sizes), sum(sizes))


def _expire(folder: Folder, stamp: int, swept: _Swept) -> Iterator[int]:
    """Restore or remove the blobs that an earlier sweep moved; yield the sizes that were freed."""
    with contextlib.suppress(FileNotFoundError):  # another sweep is faster
        with folder.enter(QUARANTINE, str(stamp)) as moved:
            for name in filter(swept.looks_at, moved.names()):
                status = moved.stat(name)
                if status is None:
                    continue
                # Checked again: it may be reachable, or was renewed since a sweep saw it old.
                # The stamp is in whole milliseconds, and so is the comparison.
                old_at = status.st_mtime + swept.older_than
                if name in swept.keep or int(old_at * 1000) > stamp:
                    _bring_back(folder, moved, name)
                elif swept.now - stamp / 1000 >= swept.older_than and moved.remove(name):
                    yield status.st_size
        with folder.enter(QUARANTINE) as quarantine:
            quarantine.remove_folder(str(stamp))


def _bring_back(folder: Folder, moved: Folder, name: str) -> None:
    with contextlib.suppress(FileNotFoundError), folder.make(name[:2]) as shard:
        moved.rename(name, name, to=shard)
        shard.sync()


def _move_away(folder: Folder, swept: _Swept) -> int:
    names = [
        (shard, name)
        for shard in folder.names()
        if _SHARD.match(shard)
        for name in _sweepable(folder, shard, swept)
    ]
    if not names:
        return 0
    count = 0
    with folder.make(QUARANTINE, str(int(swept.now * 1000))) as moved:
        for prefix, name in names:
            with contextlib.suppress(FileNotFoundError), folder.enter(prefix) as shard:
                shard.rename(name, name, to=moved)
                count += 1
        moved.sync()
    return count


def _sweepable(folder: Folder, prefix: str, swept: _Swept) -> list[str]:
    old = []
    with folder.enter(prefix) as shard:
        for name in filter(swept.looks_at, shard.names()):
            status = shard.stat(name)
            if status is None or swept.now - status.st_mtime < swept.older_than:
                continue
            if name.endswith(TEMPORARY):
                shard.remove(name)  # a writer that was killed long ago
            elif is_name(name) and name not in swept.keep:
                old.append(name)
    return old
