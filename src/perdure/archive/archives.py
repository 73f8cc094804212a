"""Archives of an agent's home folder: save, list, restore and verify them with a session.

The functions that take a `Folder` block; `Archives` calls them in a thread.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.ids import random_id
from perdure._lib.logs import log_facts
from perdure.archive import atomic_swap
from perdure.archive.blobs import entries_of, hop
from perdure.archive.limits import CONTROL, ArchiveLimits, Selection, selection_of
from perdure.archive.restore import (
    ArchiveRestored,
    ExtractPlan,
    is_same,
    put_back,
    put_back_from,
    verify,
)
from perdure.archive.save import ArchiveSaved, Progress, TreeSave, take
from perdure.archive.tar import export
from perdure.errors import ConfigError, InvalidArgumentError, SessionError
from perdure.memory.documents import StateSet
from perdure.records.archives import DOCUMENT, Archive
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey, require_text
from perdure.records.records import STATE, Entry
from perdure.session.internals import accept, contents_of, store_of
from perdure.session.session import Session, SessionView
from perdure.store import SupportsFolders, capability

FILES: Final = "files"
"""Name of the agent's home in its folder of the file store."""


def files_of(session: Session | SessionView) -> str | None:
    """Return an agent's folder for files; None if the store has no folders for agents."""
    store = capability(store_of(session), SupportsFolders)
    return None if store is None else str(Path(store.folder_of(session.key)) / FILES)


def note_saved(control: Folder, marker: atomic_swap.ArchiveMarker) -> None:
    """Record which archive the home equals, and remove what the last restore replaced."""
    atomic_swap.mark(control, marker)
    atomic_swap.set_aside(control, atomic_swap.REPLACED)
    atomic_swap.remove_left(control)


def why_kept(
    home: Folder, control: Folder, key: SessionKey, latest: Archive, selection: Selection
) -> str:
    """Return why a home stays as it is at a start; empty if the newest archive must be restored."""
    marker = atomic_swap.marker_of(control)
    if marker is not None and marker.is_of(key):
        if marker.key != key:
            return "another session of the agent has used it since"
        is_newer = latest.id in (marker.archive, *marker.newer_than)
        return "it continues from this archive" if is_newer else ""
    return (
        "it has files that were never archived" if atomic_swap.occupied_by(home, selection) else ""
    )


def note_saving(control: Folder, key: SessionKey, archive: str) -> None:
    """Record which archive is being saved, so that after a crash the home counts as newer."""
    marker = atomic_swap.marker_of(control)
    if marker is not None and marker.is_of(key):
        also = (*marker.newer_than, archive)
        atomic_swap.mark(control, msgspec.structs.replace(marker, newer_than=also))


def require_known(
    home: Folder,
    control: Folder,
    key: SessionKey,
    force: bool,  # noqa: FBT001  # called in a thread
    plan: ExtractPlan,
) -> None:
    """Refuse to replace files that were never archived.

    Raises:
        SessionError: The home has such files, and *force* is False.

    """
    marker = atomic_swap.marker_of(control)
    if force or (marker is not None and marker.is_of(key)):
        return
    occupied = atomic_swap.occupied_by(home, plan.selection)
    if occupied:
        raise SessionError(
            f"{home.path} has files that are in no archive of {key.agent}, {occupied[0]!r} among "
            "them: save them first, choose an empty folder, or say force=True (--force)",
            path=home.path,
            entries=len(occupied),
        )


def require_named(path: Path, plan: ExtractPlan, selection: Selection) -> None:
    """Refuse hidden folders of an archive file that ``persist_paths`` do not name.

    Raises:
        ConfigError: The file has some.

    """
    beyond = plan.selection.hidden_beyond(selection)
    if beyond:
        raise ConfigError(
            f"{path} brings {', '.join(map(ascii, beyond[:5]))}, hidden and not named here: such "
            "files may change how a shell or a tool behaves; to take them, name them in "
            "persist_paths (paths=, --path); nothing was changed",
            path=str(path),
            hidden=beyond,
        )


def restored(archive: Archive | None, home: Folder, replaced: list[str] | None) -> ArchiveRestored:
    """Return the result of a restore; *replaced* is None if nothing had to change."""
    if replaced is None:
        return ArchiveRestored(archive=archive, changed=False)
    old = Path(home.path, CONTROL, atomic_swap.REPLACED, atomic_swap.OLD)
    kept = str(old) if any(old.iterdir()) else ""
    return ArchiveRestored(archive=archive, changed=True, replaced=tuple(replaced), kept=kept)


# The list of a session's archives, as folded from its log.


def entry_of(archive: Archive, removed: list[str]) -> Entry:
    """Return the record that adds an archive to the list and removes expired ones."""
    value = msgspec.Raw(encode({archive.id: archive}))
    return Entry(STATE, encode(StateSet(DOCUMENT, value, partial=True, gone=removed)))


log: logging.Logger = logging.getLogger("perdure")

KEPT: Final = 10
PAUSE: Final = 0.1
"""Seconds between attempts to lock a home that another process holds."""


@final
class Archives:
    """Archives of an agent's home folder, stored with a session: ``Archives(session)``.

    An archive has the visible files of the folder, and the hidden folders that ``persist_paths``
    name. Saving and restoring both skip links, pipes and devices.

    Args:
        session: An open session, or a loaded one to list, verify and export archives.
        home: The home folder. Default: the agent's own, if the store has one for it.
        paths: ``persist_paths``: folders in the home, including hidden ones to archive.
        whole: Whether to archive everything visible; otherwise only these paths.
        limits: How large an archive may be.
        wait: Seconds to wait for another process that saves or restores the same home.

    Raises:
        ConfigError: A path is absolute, or leaves the home folder.

    """

    def __init__(
        self,
        session: Session | SessionView,
        home: str | os.PathLike[str] | None = None,
        *,
        paths: Sequence[str] = (),
        whole: bool = True,
        limits: ArchiveLimits = ArchiveLimits(),  # noqa: B008  # frozen
        wait: float = 60.0,
    ) -> None:
        self._session = session
        self._key = session.key
        self._store = store_of(session)
        self._home = files_of(session) if home is None else str(Path(home).absolute())
        self._selection = selection_of(paths, whole=whole)
        self._limits = limits
        self._wait = wait

    def __repr__(self) -> str:
        return f"<Archives of {self._key}>"

    @property
    def home(self) -> str | None:
        """The home folder; None if none was given and the store has none for the agent."""
        return self._home

    # listing

    async def all(self) -> list[Archive]:
        """Return the session's archives, newest first."""
        document = await contents_of(self._session).state_document(DOCUMENT)
        have = {} if document is None else decode(document, dict[str, Archive])
        return [*have.values()][::-1]

    async def latest(self) -> Archive | None:
        """Return the newest archive, None if there is none."""
        return next(iter(await self.all()), None)

    async def find(self, name: str | None = None) -> Archive:
        """Return the archive with this id, or the newest with this label; None: the newest.

        Raises:
            ConfigError: There is no such archive.

        """
        have = await self.all()
        by_id = [archive for archive in have if name in {None, archive.id}]
        matches = by_id or [archive for archive in have if archive.label == name]
        if not matches:
            names = ", ".join(archive.label or archive.id for archive in have) or "none"
            wanted = "no archive" if name is None else f"no archive {name!r}"
            raise ConfigError(
                f"session {self._key} has {wanted}: it has {names}",
                key=str(self._key),
                archive=name,
            )
        return matches[0]

    # saving

    async def save(
        self, *, label: str = "", keep: int = KEPT, progress: Progress = None
    ) -> ArchiveSaved:
        """Archive the home folder; the result is durable and was read back.

        Contents that an earlier archive has are not stored again. If nothing has changed since the
        newest archive, that one is returned. A cancelled save leaves only blobs that garbage
        collection removes.

        Args:
            label: A name to restore it by.
            keep: How many archives to keep, the new one included.
            progress: Called with the progress so far.

        Raises:
            ConfigError: There is no home folder, a path in it is a symbolic link, or the label is
                not text.
            NotStorableError: A name cannot be in an archive, or the store has no blobs.
            TooLargeError: It is over a limit.
            SessionError: The session is read-only, or the home is being saved or restored.
            LeaseLostError: Another process has taken the session over.

        """
        session = self._session
        if isinstance(session, SessionView):
            raise SessionError(
                f"session {self._key} was loaded to read: open it to save an archive",
                key=str(self._key),
            )
        require_text("archive label", label)
        if keep < 1:
            raise InvalidArgumentError(f"invalid keep={keep!r}: expected at least 1", option="keep")
        async with self._alone() as (home, control):
            before = await self.latest()
            result = await take(
                self._store,
                self._key,
                home,
                self._selection,
                limits=self._limits,
                before=before,
                progress=progress,
            )
            archive = self._archive(result, label)
            new = (
                before is None
                or archive.label not in {"", before.label}
                or (archive.pages, archive.paths, archive.whole)
                != (before.pages, before.paths, before.whole)
            )
            if new:
                await hop(home.path, note_saving, control, self._key, archive.id)
                expired = [archive.id for archive in (await self.all())[keep - 1 :]]
                accept(session, (entry_of(archive, expired),))
            await session.save()
            stands = archive if new or before is None else before
            await hop(
                home.path, note_saved, control, atomic_swap.ArchiveMarker(self._key, stands.id)
            )
        return ArchiveSaved(
            archive=stands,
            new=new,
            stored_bytes=result.stored_bytes,
            skipped=tuple(result.skipped),
            changing=tuple(result.changing),
        )

    def _archive(self, result: TreeSave, label: str) -> Archive:
        now = time.time()
        when = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y%m%d-%H%M%S")
        return Archive(
            id=f"{when}-{random_id(5)}",
            at=now,
            label=label,
            paths=self._selection.paths,
            whole=self._selection.whole,
            files=result.files,
            folders=len(result.entries) - result.files,
            bytes=result.bytes,
            pages=result.pages,
        )

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[tuple[Folder, Folder], None]:
        path = self._home
        if path is None:
            raise ConfigError(
                f"{self._store.location} keeps no folder for the agent of {self._key}: give the "
                "home folder",
                option="home",
            )
        stack = ExitStack()
        try:
            yield await self._entered(path, stack)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(stack.close)

    async def _entered(self, path: str, stack: ExitStack) -> tuple[Folder, Folder]:
        """Lock and open the home, waiting for another process that saves or restores it."""
        for _ in range(int(self._wait / PAUSE)):
            with suppress(atomic_swap.BusyError):
                return await hop(path, stack.enter_context, atomic_swap.entered(path))
            await anyio.sleep(PAUSE)
        return await hop(path, stack.enter_context, atomic_swap.entered(path))

    # restoring

    async def restore(
        self, name: str | None = None, *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Restore the home folder from an archive; later files are removed from it, too.

        Replaced files are in the home's ``.perdure/replaced`` until the next save or restore.
        Crash-safe: a killed restore has changed nothing, or the next access to the home completes
        it.

        Args:
            name: An archive's id, or a label; None: the newest.
            force: Restore even if the home has files and was never saved or restored before.
            progress: Called with the progress so far.

        Raises:
            ConfigError: There is no such archive, or a link is in the way.
            CorruptRecordError: A part of the archive is lost or damaged; nothing was changed.
            SessionError: The home has files that are in no archive, or is being saved.
            StoreUnavailableError: The disk is full, or refuses the write.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        description = f"archive {archive.id} of {self._key}"
        async with self._alone() as (home, control):
            replaced: list[str] | None = None
            if not await is_same(home, plan, self._limits):
                await hop(home.path, require_known, home, control, self._key, force, plan)
                replaced = await put_back(
                    self._store,
                    self._key,
                    home,
                    control,
                    plan,
                    description=description,
                    progress=progress,
                )
            await hop(home.path, atomic_swap.mark, control, await self._as(archive.id))
            return await hop(home.path, restored, archive, home, replaced)

    async def resume(self, *, progress: Progress = None) -> ArchiveRestored:
        """Restore the newest archive at a start, unless the home equals it or is newer.

        A home stays as it is if it was last saved or restored here and the session has no newer
        archive from elsewhere: it may have files that a killed process wrote after its last save.
        So does a home that another session of the agent uses, and one with files that was never
        saved.
        """
        latest = await self.latest()
        if latest is None:
            return ArchiveRestored(archive=None, changed=False)
        async with self._alone() as (home, control):
            facts = (home, control, self._key, latest, self._selection)
            reason = await hop(home.path, why_kept, *facts)
        if reason:
            log_facts(log, logging.INFO, "home kept", session=str(self._key), why=reason)
            return ArchiveRestored(archive=latest, changed=False, why=f"the home stays: {reason}")
        return await self.restore(latest.id, progress=progress)

    async def _as(self, archive: str) -> atomic_swap.ArchiveMarker:
        """Return the marker of a home that was restored from an archive, newest or not."""
        latest = await self.latest()
        return atomic_swap.ArchiveMarker(self._key, archive, () if latest is None else (latest.id,))

    async def verify(self, name: str | None = None) -> Archive:
        """Read and check all of an archive, and return it.

        Raises:
            ConfigError: There is no such archive.
            CorruptRecordError: A part of it is lost or damaged.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        await verify(self._store, self._key, plan, f"archive {archive.id} of {self._key}")
        return archive

    async def _plan(self, archive: Archive) -> ExtractPlan:
        stream = entries_of(self._store, self._key, archive, self._limits)
        async with aclosing(stream):
            entries = tuple([entry async for entry in stream])
        return ExtractPlan(entries, Selection(archive.paths, archive.whole))

    # archive files

    async def write(self, path: str | os.PathLike[str], name: str | None = None) -> int:
        """Write an archive into a new file, and return the file's size in bytes.

        Args:
            path: Ends in ``.tar.zst``, ``.tar.gz``, ``.tgz`` or ``.tar``.
            name: An archive's id, or a label; None: the newest.

        Raises:
            ConfigError: There is no such archive, the file exists, or its suffix is unknown.
            MissingExtraError: ``.tar.zst`` needs zstandard.
            CorruptRecordError: A part of the archive is lost or damaged.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        return await export(self._store, self._key, archive, plan.entries, Path(path))

    async def read(
        self, path: str | os.PathLike[str], *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Restore the home folder from a file that `write` made; the file may be untrusted.

        This adds no archive to the session; call `save` for one. Otherwise as `restore`.

        Raises:
            ConfigError: It has hidden folders that are not among ``paths``.
            CorruptRecordError: It is not an archive, is damaged, or has entries that none may have.
            TooLargeError: It is over a limit.
            UnsupportedVersionError: A newer release wrote it.

        """
        async with self._alone() as (home, control):

            def check(plan: ExtractPlan) -> None:
                require_named(Path(path), plan, self._selection)
                require_known(home, control, self._key, force, plan)

            replaced = await put_back_from(
                Path(path), home, control, self._limits, check=check, progress=progress
            )
            await hop(home.path, atomic_swap.mark, control, await self._as(""))
            return await hop(home.path, restored, None, home, replaced)
