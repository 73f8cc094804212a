"""What is done to one session in one hop, besides appending: folding, and letting go of it."""

from __future__ import annotations

import os
from collections.abc import Collection

import msgspec

from perdure._lib.files import Folder
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.store import Documents
from perdure.stores.file import documents, leases, reading
from perdure.stores.file.chain import Known
from perdure.stores.file.layout import released_name, session_path
from perdure.stores.file.owners import Owner
from perdure.stores.file.writing import Writer, lost

__all__ = ["delete", "read_documents", "release", "write_documents"]


def read_documents(
    root: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    held: bool,  # noqa: FBT001  # passed through a thread, by position
) -> Documents:
    """Read documents; who holds the session also keeps the evidence of damage."""
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return Documents()
    with folder:
        lease = leases.read_lease(folder, leases.newest_epoch(folder))
        if lease is not None:
            leases.require_key(folder, key, lease)
            if lease.deleted:
                return Documents()
        found = documents.read(folder, key, names, since=lease.since if lease else 0)
        if found.damaged and held:
            documents.keep_evidence(folder, key, found.damaged)
        return found


def release(writer: Writer) -> None:
    """Say that the holder writes no more, if it still is the holder."""
    with writer.lock:
        folder = writer.folder()
        if writer.fence.holds(folder):
            # Empty, so it needs no temporary file that a successor could tidy away from us.
            os.close(folder.open(released_name(writer.epoch), os.O_WRONLY | os.O_CREAT))
        writer.close_files()


def delete(writer: Writer, me: Owner) -> None:
    """End a session's life, as its holder."""
    with writer.lock:
        try:
            writer.require_mine()
            writer.close_files()  # not everywhere can a file that is open be removed
            folder = writer.folder()
            if not leases.mark_deleted(folder, writer.key, writer.epoch, me):
                raise lost(writer.key, writer.epoch)
        finally:
            writer.close_files()


def write_documents(writer: Writer, new: dict[str, bytes], manifest: Manifest) -> None:
    """Fold, and note in the manifest where the log goes on."""
    with writer.lock:
        folder = writer.folder()
        at = _vouched(writer, folder, manifest)
        position = msgspec.Raw(msgspec.json.encode(at))
        try:
            documents.write(
                folder,
                new,
                msgspec.structs.replace(manifest, position=position),
                writer.require_mine,
            )
        except OSError:
            writer.require_mine()  # a new holder tidies up what an old one left
            raise
        finally:
            writer.rest()


def _vouched(writer: Writer, folder: Folder, manifest: Manifest) -> Known | None:
    """Return the last known position that all documents are at or behind."""
    lowest = min([manifest.as_of_seq, *(one.as_of_seq for one in manifest.documents.values())])
    for known in (writer.durable, writer.before):
        if known.at.seq <= lowest:
            return known
    before = documents.read_manifests(folder, writer.key)
    positions = filter(None, (reading.position_of(one.manifest.position) for one in before))
    near = [known for known in positions if known.at.seq <= lowest]
    return max(near, key=lambda known: known.at.seq, default=None)
