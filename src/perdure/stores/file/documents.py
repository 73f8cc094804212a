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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from perdure._lib.files import TEMPORARY, Folder
from perdure._lib.logs import LogOnce, log_facts
from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.chunks import is_name, require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, FoldedDocument, Manifest, decode_manifest
from perdure.records.records import Position, open_sealed
from perdure.store import BlobSweep, Document, Documents
from perdure.stores.file.layout import (
    DEAD_LETTERS,
    INBOX,
    LABELS,
    LOG,
    MANIFEST,
    MANIFESTS,
    NEXT_MANIFEST,
    QUARANTINE,
    Numbered,
    aside_name,
    blobs_of,
    decoded,
    document_path,
    encode_name,
    epoch_in,
    sealed,
    segment_of,
    start_of,
    unsealed,
)
from perdure.stores.file.segments import DurablePosition, LogSegment, require_key

_log = logging.getLogger("perdure")
_warned = LogOnce()

_MAX_REREADS = 100
"""Concurrent folds in a row that a reader retries before it reports what it read."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A manifest file that passed its checksum."""

    manifest: Manifest
    is_pending: bool
    """True while the fold that it announces has not finished."""


class Manifests(msgspec.Struct, frozen=True):
    """The manifests in a session's folder."""

    files: list[ManifestFile] = []
    """Completed ones first, the newest first."""
    damaged: dict[str, bytes] = {}
    """Those that fail their checksum, by name: it is unknown what was folded."""

    def mark_in(self, segment: LogSegment) -> Position:
        """Return the position in a segment that a manifest proves, its start without one."""
        for file in self.files:
            mark = position_of(file.manifest)
            if mark is not None and (mark.epoch, mark.number) == (segment.epoch, segment.number):
                return mark.at
        return segment.start


def position_of(manifest: Manifest) -> DurablePosition | None:
    """Return the position where the log continues after a fold, None if the manifest has none."""
    # A position in another release's shape is ignored: the reader just reads more.
    return decoded(manifest.position, DurablePosition)


def read_manifests(
    folder: Folder, key: SessionKey, *, since: int = 0, names: Collection[str] | None = None
) -> Manifests:
    """Return the manifests of a session's current generation.

    *names* are those in the folder, if they were listed already.

    Raises:
        UnsupportedVersionError: A manifest has a newer format.
        CorruptRecordError: A manifest belongs to another session.

    """
    contents: dict[str, bytes | None] = {}
    for _ in range(_MAX_REREADS):
        contents = {
            name: folder.read(name)
            for name in (folder.names() if names is None else names)
            if epoch_in(name, MANIFESTS) >= max(since, 1)
        }
        names = None
        # A file that vanished since the listing may have been renamed to one read before it.
        if None not in contents.values():
            break
    manifests = Manifests([], {})
    for name, data in contents.items():
        if data is None:
            continue
        path = f"{folder.path}/{name}"
        manifest = decode_manifest(open_sealed(data), path, path=path)
        if manifest is not None:
            require_key(path, manifest.key, key)
            manifests.files.append(ManifestFile(manifest, NEXT_MANIFEST.epoch(name) > 0))
            continue
        manifests.damaged[name] = data
        if _warned.first((path, data)):
            message = "the manifest of session %(session)s is damaged; it is rebuilt from the log"
            log_facts(_log, logging.WARNING, message, session=str(key), path=path)
    manifests.files.sort(key=lambda file: (file.is_pending, -file.manifest.epoch))
    return manifests


def require_folded(
    folder: Folder, key: SessionKey, manifests: Iterable[ManifestFile], head: int
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


def read(
    folder: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    *,
    since: int = 0,
    manifests: Manifests | None = None,
) -> Documents:
    """Read documents, consistently even while the holder folds.

    *manifests* are those of the folder, if they were read already.
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
    if result.manifest is not None or not (manifests.damaged or names is None):
        return result
    unlisted: dict[str, bytes] = {}
    for name in _names_on_disk(folder) if names is None else names:
        data = None if name in result.found else _bytes_of(folder, name)
        if data is not None:
            unlisted[name] = data
    damaged = tuple(unlisted) if manifests.damaged else ()  # a first fold may have been killed
    # A wrapper keeps its keys in folders, and needs them even without a manifest.
    in_folders = {name: data for name, data in unlisted.items() if "/" in name}
    return msgspec.structs.replace(result, damaged=damaged, remains=in_folders)


def _names_on_disk(folder: Folder) -> list[str]:
    """Return which documents exist on disk, valid or not, down to one folder deep."""
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


def _match(folder: Folder, manifests: Manifests, names: Collection[str] | None) -> Documents:
    files = manifests.files
    current = files[0].manifest if files and not files[0].is_pending else None
    listed = dict.fromkeys(name for file in files for name in file.manifest.documents)
    documents: dict[str, Document] = {}
    damaged = []
    for name in listed if names is None else [name for name in listed if name in names]:
        document = _document(folder, name, files)
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
    with contextlib.suppress(FileNotFoundError), folder.enter(*steps) as parent:
        return parent.read(last)
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
    # 1. Announce the fold: a reader that meets a new document finds its hash there.
    require_held()
    pending = NEXT_MANIFEST.name(manifest.epoch)
    folder.replace(pending, sealed(manifest))
    folder.sync()
    # 2. Replace the documents.
    by_folder: dict[tuple[str, ...], list[tuple[str, bytes]]] = {}
    for name, data in documents.items():
        *steps, last = document_path(name)
        by_folder.setdefault(tuple(steps), []).append((last, data))
    for path, files in by_folder.items():
        with folder.make(*path) as parent:
            for last, data in files:
                parent.replace(last, data)
            parent.sync()
    # 3. Make the announced manifest the current one, while the session is still held.
    require_held()
    replaced = _replaced_manifests(folder, manifest.key)
    previous = {name for file in replaced.files for name in file.manifest.documents}
    folder.rename(pending, MANIFEST.name(manifest.epoch))
    folder.sync()
    # 4. Remove what is listed no more. A kill before this leaves files that count for nothing.
    _remove_documents(folder, previous - manifest.documents.keys())
    for name, data in replaced.damaged.items():
        if epoch_in(name, MANIFESTS) < manifest.epoch:
            _quarantine(folder, name, data)
    remove_below(folder, folder.names(), manifest.epoch, MANIFESTS)


def _replaced_manifests(folder: Folder, key: SessionKey) -> Manifests:
    """Return the manifests that are about to be replaced; one of a newer format does not block."""
    with contextlib.suppress(UnsupportedVersionError):
        return read_manifests(folder, key)
    return Manifests()


def remove_below(
    folder: Folder, names: Iterable[str], below: int, kinds: Collection[Numbered]
) -> None:
    """Remove the files of these kinds that have an epoch below *below*."""
    for name in names:
        if 0 < epoch_in(name, kinds) < below:
            folder.remove(name)


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
            message = "a document of session %(session)s is damaged; it is rebuilt from the log"
            size = len(data or b"")
            log_facts(_log, logging.WARNING, message, session=str(key), path=path, bytes=size)
        if data is not None:
            _quarantine(folder, name, data)


def _quarantine(folder: Folder, name: str, data: bytes) -> None:
    copy = f"{encode_name(name)}.{hashlib.sha256(data).hexdigest()[:12]}"
    # Best effort: even on a full disk, the log rebuilds what was folded.
    with contextlib.suppress(OSError), folder.make(QUARANTINE) as quarantine:
        if not quarantine.has(copy):
            quarantine.replace(copy, data)


_IN_EACH_FOLD = "session.json"


def set_aside(folder: Folder, key: SessionKey, *, below: int) -> None:
    """Move the segments of a damaged log to quarantine, and copy its documents there."""
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        segments = [name for name in log.names() if (segment_of(name) or (below,))[0] < below]
        if not segments:
            return
        for file in _replaced_manifests(folder, key).files:
            for name in (MANIFEST.name(file.manifest.epoch), *file.manifest.documents):
                data = _bytes_of(folder, name)
                if file.manifest.epoch < below and data is not None:
                    _quarantine(folder, name, data)
        with folder.make(QUARANTINE) as quarantine:
            for name in segments:
                log.rename(name, aside_name(name), quarantine)
            quarantine.sync()
            log.sync()
            message = (
                "the log of session %(session)s is damaged, and was set aside in %(path)s: a new "
                "one begins"
            )
            log_facts(_log, logging.WARNING, message, session=str(key), path=quarantine.path)


def remove_unfinished(folder: Folder, manifests: Manifests) -> None:
    """Remove files that killed holders left unfinished; only for the holder."""
    listed = (name for file in manifests.files for name in file.manifest.documents)
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
    manifests = _replaced_manifests(folder, key)
    remove_unfinished(folder, manifests)
    # Listed before the manifests are read again: a later generation announces what it writes.
    is_known = bool(manifests.files) and not manifests.damaged
    on_disk = () if is_known else _names_on_disk(folder)
    # Read just before: a later generation may fold by now, if this process was suspended.
    manifests = _replaced_manifests(folder, key)
    ours, later = set[str](), set[str]()
    for file in manifests.files:
        (ours if file.manifest.epoch < below else later).update(file.manifest.documents)
    is_damaged = any(epoch_in(name, MANIFESTS) < below for name in manifests.damaged)
    # It may have listed any of them; and so may one that is lost, if there was a fold.
    if is_damaged or (not manifests.files and _IN_EACH_FOLD in on_disk):
        ours.update(on_disk)
    _remove_documents(folder, ours - later)
    names = folder.names()
    remove_below(folder, names, below, (*MANIFESTS, LABELS))
    _remove_files(
        folder, LOG, lambda name: (segment_of(name) or start_of(name) or (below,))[0] < below
    )
    for name in names:
        if 0 < INBOX.epoch(name) < (inbox or below) or 0 < DEAD_LETTERS.epoch(name) < below:
            _remove_files(folder, name)
    if evidence:
        _remove_files(folder, QUARANTINE)


def _remove_files(folder: Folder, step: str, is_ours: Callable[[str], bool] | None = None) -> None:
    with contextlib.suppress(FileNotFoundError):
        with folder.enter(step) as inner:
            for name in filter(is_ours, inner.names()):
                inner.remove(name)
        folder.remove_folder(step)


# Labels that a listing shows: those of the last save that changed them


class SavedLabels(msgspec.Struct, frozen=True):
    """Content of ``labels-<epoch>.json``."""

    seq: int
    """The record that they are as of: a fold as of a later one knows better."""
    about: About


def save_labels(folder: Folder, epoch: int, seq: int, about: About) -> None:
    """Keep labels for listings. They are in the log: it need not be durable, nor work."""
    with contextlib.suppress(OSError):
        folder.replace(LABELS.name(epoch), sealed(SavedLabels(seq, about)), durable=False)
        remove_below(folder, folder.names(), epoch, (LABELS,))


def read_labels(folder: Folder, names: Collection[str], since: int) -> SavedLabels | None:
    """Return the newest labels of a session's generation; None without any."""
    epoch = max(map(LABELS.epoch, names), default=0)
    data = folder.read(LABELS.name(epoch)) if epoch >= since else None
    return unsealed(data, SavedLabels)


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
    # A sweep may have set it aside: take it back instead of writing it again.
    for moved in _blob_folders(folder):
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
    with contextlib.suppress(FileNotFoundError), root.enter(*blobs_of(tenant)) as folder:
        for _ in range(2):  # a sweep, or a put, may move it between two reads
            for place in _blob_folders(folder, name[:2]):
                data = place.read(name)
                if data is not None:
                    return verified(name, data, at=f"{place.path}/{name}")
    return None


def _blob_folders(folder: Folder, *shards: str) -> Iterator[Folder]:
    """Yield these shards, then the folders in quarantine; each is closed after its turn."""
    for shard in shards:
        with contextlib.suppress(FileNotFoundError), folder.enter(shard) as inner:
            yield inner
    for stamp in _stamps(folder):  # only now: a sweep may just have moved a blob there
        with contextlib.suppress(FileNotFoundError), folder.enter(QUARANTINE, str(stamp)) as moved:
            yield moved


def _shards(folder: Folder) -> list[str]:
    return list(filter(_SHARD.match, folder.names()))


def _stamps(folder: Folder) -> list[int]:
    with contextlib.suppress(FileNotFoundError), folder.enter(QUARANTINE) as quarantine:
        return sorted(int(name) for name in quarantine.names() if name.isdecimal())
    return []


def blob_names(root: Folder, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError), root.enter(*blobs_of(tenant)) as folder:
        for place in _blob_folders(folder, *_shards(folder)):
            names.update(filter(is_name, place.names()))
    return sorted(names)


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
        for moved in _blob_folders(folder):
            if moved.has(name):
                _bring_back(folder, moved, name)
        if not any(place.has(name) for place in _blob_folders(folder, name[:2])):
            return False


def remove_blobs(root: Folder, tenant: str, names: Collection[str]) -> int:
    """Remove blobs, from quarantine too, and return how many bytes were freed."""
    freed = 0
    with contextlib.suppress(FileNotFoundError), root.enter(*blobs_of(tenant)) as folder:
        for place in _blob_folders(folder, *_shards(folder)):
            for name in filter(is_name, place.names()):
                status = place.stat(name) if name in names else None
                if status is not None and place.remove(name):
                    freed += status.st_size
            place.sync()
    return freed


class _Swept(msgspec.Struct, frozen=True):
    """The blobs that a sweep looks at, and those that it keeps."""

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
    moved_count = 0
    with folder:
        sizes = [size for stamp in _stamps(folder) for size in _expire(folder, stamp, swept)]
        old = [(prefix, name) for prefix in _shards(folder) for name in _old(folder, prefix, swept)]
        if old:
            with folder.make(QUARANTINE, str(int(now * 1000))) as moved:
                for prefix, name in old:
                    with contextlib.suppress(FileNotFoundError), folder.enter(prefix) as shard:
                        shard.rename(name, name, to=moved)
                        moved_count += 1
                moved.sync()
    return BlobSweep(moved_count, len(sizes), sum(sizes))


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


def _old(folder: Folder, prefix: str, swept: _Swept) -> list[str]:
    """Return the blobs of a shard to move away, and remove what writers left there long ago."""
    old = []
    with folder.enter(prefix) as shard:
        for name in filter(swept.looks_at, shard.names()):
            status = shard.stat(name)
            if status is None or swept.now - status.st_mtime < swept.older_than:
                continue
            if name.endswith(TEMPORARY):
                shard.remove(name)
            elif is_name(name) and name not in swept.keep:
                old.append(name)
    return old
