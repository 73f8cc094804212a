"""Archives of a session: save the agent's home folder with it, list archives, restore one."""

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
from perdure.archive.atomic_swap import (
    OLD,
    REPLACED,
    ArchiveMarker,
    BusyError,
    drop_replaced,
    entered,
    mark,
    marker_of,
    occupied_by,
)
from perdure.archive.blobs import entries_of, hop
from perdure.archive.entries import DOCUMENT, Archive
from perdure.archive.export import export
from perdure.archive.limits import CONTROL, ArchiveLimits
from perdure.archive.restore import (
    ArchiveRestored,
    ExtractPlan,
    is_same,
    put_back,
    put_back_from,
    verify,
)
from perdure.archive.save import ArchiveSaved, Progress, SaveResult, take
from perdure.archive.selection import Selection, selection_of
from perdure.errors import ConfigError, SessionError
from perdure.memory.documents import StateSet
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey, require_text
from perdure.records.records import STATE, Entry
from perdure.session.internals import accept, document_of, store_of
from perdure.session.session import Session
from perdure.session.view import SessionView

FILES: Final = "files"
"""The agent's home, in its folder of the file store."""


def files_of(session: Session | SessionView) -> str | None:
    """Return the folder of an agent for its files, None where the store has none for it."""
    find = getattr(store_of(session), "folder_of", None)
    return None if find is None else str(Path(find(session.key)) / FILES)


def note_saved(control: Folder, marker: ArchiveMarker) -> None:
    """Note which archive the home is; what the last restore replaced is not needed any more."""
    mark(control, marker)
    drop_replaced(control)


def why_kept(
    home: Folder, control: Folder, key: SessionKey, latest: Archive, selection: Selection
) -> str:
    """Say why a home goes on as it is at a start; empty if the newest archive is to come back."""
    marker = marker_of(control)
    if marker is not None and marker.is_of(key):
        if marker.key != key:
            return "another session of the agent has used it since"
        return "it goes on from this archive" if marker.goes_on_from(latest.id) else ""
    return "it has files that were never archived" if occupied_by(home, selection) else ""


def note_saving(control: Folder, key: SessionKey, archive: str) -> None:
    """Note which archive is being made of a home: after a kill it goes on, listed or not."""
    marker = marker_of(control)
    if marker is not None and marker.is_of(key):
        also = (*marker.newer_than, archive)
        mark(control, msgspec.structs.replace(marker, newer_than=also))


def require_known(
    home: Folder,
    control: Folder,
    key: SessionKey,
    force: bool,  # noqa: FBT001  # called in a thread
    plan: ExtractPlan,
) -> None:
    """Refuse to replace files that nobody has saved.

    Raises:
        SessionError: The home has some, and ``force`` is False.

    """
    marker = marker_of(control)
    if force or (marker is not None and marker.is_of(key)):
        return
    occupied = occupied_by(home, plan.selection)
    if occupied:
        message = (
            f"{home.path} has files that are in no archive of {key.agent}, {occupied[0]!r} among "
            "them: save them first, choose an empty folder, or say force=True (--force)"
        )
        raise SessionError(message, path=home.path, entries=len(occupied))


def require_named(path: Path, plan: ExtractPlan, selection: Selection) -> None:
    """Refuse hidden folders of a file from elsewhere that nobody here has asked for.

    Raises:
        ConfigError: It brings some.

    """
    beyond = plan.selection.hidden_beyond(selection)
    if beyond:
        message = (
            f"{path} brings {', '.join(map(ascii, beyond[:5]))}, hidden and not named here: such "
            "files may change how a shell or a tool behaves; to take them, name them in "
            "persist_paths (paths=, --path); nothing was changed"
        )
        raise ConfigError(message, path=str(path), hidden=beyond)


def restored(
    archive: Archive | None, home: Folder, control: Folder, replaced: list[str] | None
) -> ArchiveRestored:
    """Return what a restore says that it did; None: nothing, since all was as it is."""
    if replaced is None:
        return ArchiveRestored(archive=archive, changed=False)
    with control.enter(REPLACED, OLD) as old:
        kept = str(Path(home.path, CONTROL, REPLACED, OLD)) if old.names() else ""
    return ArchiveRestored(archive=archive, changed=True, replaced=tuple(replaced), kept=kept)


# The list of a session's archives, as its log folds to it. Pure


def listed(document: bytes | None) -> list[Archive]:
    """Return the archives of a document, newest first."""
    have = {} if document is None else decode(document, dict[str, Archive])
    return [*have.values()][::-1]


def named(have: Sequence[Archive], name: str | None) -> Archive | None:
    """Return the archive with an id, or the newest with a label; for None the newest."""
    by_id = [path for path in have if name in {None, path.id}]
    by_label = [path for path in have if path.label == name]
    return next(iter((*by_id, *by_label)), None)


def differ(archive: Archive, before: Archive) -> bool:
    """Say whether an archive is another one than the newest; a label of its own makes it one."""
    relabeled = archive.label not in {"", before.label}
    same = (archive.pages, archive.paths, archive.whole)
    return relabeled or same != (before.pages, before.paths, before.whole)


def entry_of(archive: Archive, dropped: list[str]) -> Entry:
    """Return the record that lists an archive, and others no more."""
    value = msgspec.Raw(encode({archive.id: archive}))
    return Entry(STATE, encode(StateSet(DOCUMENT, value, partial=True, gone=dropped)))


# A session's archives: its agent's home folder, saved with the session and brought back


log: logging.Logger = logging.getLogger("perdure")

KEPT: Final = 10
PAUSE: Final = 0.1
"""Seconds between two looks at a home that somebody else has."""


@final
class Archives:
    """The files of an agent's home folder, kept with a session: ``Archives(session)``.

    An archive has the folder as it was: what is visible in it, and hidden folders that
    ``persist_paths`` name. Links, pipes and devices are passed over, both ways.

    Args:
        session: An open session; or one that was loaded, to look and to export.
        home: The home folder. Default: the agent's own, where the store keeps one for it.
        paths: ``persist_paths``: folders in it, among them hidden ones that are to be kept.
        whole: Whether everything visible is archived; else only these paths.
        limits: How large an archive may be.
        wait: Seconds to wait for somebody else who saves or restores the same home.

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
        """The home folder; None where none was given, and the store keeps none for the agent."""
        return self._home

    # which there are

    async def all(self) -> list[Archive]:
        """Return the archives that are listed, newest first."""
        return listed(await document_of(self._session, DOCUMENT))

    async def latest(self) -> Archive | None:
        """Return the newest archive, None if there is none."""
        return next(iter(await self.all()), None)

    async def find(self, name: str | None = None) -> Archive:
        """Return the archive with this id, or the newest with this label; None: the newest.

        Raises:
            ConfigError: There is no such archive.

        """
        have = await self.all()
        archives = named(have, name)
        if archives is None:
            names = ", ".join(archive.label or archive.id for archive in have) or "none"
            wanted = "no archive" if name is None else f"no archive {name!r}"
            message = f"session {self._key} has {wanted}: it has {names}"
            raise ConfigError(message, key=str(self._key), archive=name)
        return archives

    # saving

    async def save(
        self, *, label: str = "", keep: int = KEPT, progress: Progress = None
    ) -> ArchiveSaved:
        """Archive the home folder; what it returns is durable, and was read back.

        Contents that an earlier archive has are not stored again. If nothing has changed since the
        newest archive, that one stands. Cancelled, it has no effect but blobs that a sweep removes.

        Args:
            label: A name to restore it by.
            keep: How many archives stay listed.
            progress: Called as it goes on.

        Raises:
            ConfigError: There is no home folder, a path in it is a symbolic link, or the label is
                no text.
            NotStorableError: A name cannot be in an archive, or the store keeps no blobs.
            TooLargeError: It is over a limit.
            SessionError: The session is read-only, or the home is just being saved or restored.
            LeaseLostError: Somebody else has taken the session over.

        """
        session = self._writable()
        require_text("archive label", label)
        if keep < 1:
            raise ConfigError(f"keep={keep!r} does not fit: keep at least 1", option="keep")
        async with self._alone() as (home, control):
            before = await self.latest()
            taken = await take(
                self._store,
                self._key,
                home,
                self._selection,
                limits=self._limits,
                before=before,
                progress=progress,
            )
            archive = self._archive(taken, label)
            new = before is None or differ(archive, before)
            if new:
                await hop(home.path, note_saving, control, self._key, archive.id)
                dropped = [earlier.id for earlier in (await self.all())[keep - 1 :]]
                accept(session, (entry_of(archive, dropped),))
            await session.save()
            stands = archive if new or before is None else before
            await hop(home.path, note_saved, control, ArchiveMarker(self._key, stands.id))
        return ArchiveSaved(
            archive=stands,
            new=new,
            stored_bytes=taken.stored_bytes,
            skipped=tuple(taken.skipped),
            changing=tuple(taken.changing),
        )

    def _writable(self) -> Session:
        if isinstance(self._session, SessionView):
            message = f"session {self._key} was loaded to read: open it to save an archive"
            raise SessionError(message, key=str(self._key))
        return self._session

    def _archive(self, save_result: SaveResult, label: str) -> Archive:
        now = time.time()
        when = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y%m%d-%H%M%S")
        return Archive(
            id=f"{when}-{random_id(5)}",
            at=now,
            label=label,
            paths=self._selection.paths,
            whole=self._selection.whole,
            files=save_result.files,
            folders=len(save_result.entries) - save_result.files,
            bytes=save_result.bytes,
            pages=save_result.pages,
        )

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[tuple[Folder, Folder], None]:
        path = self._home
        if path is None:
            message = (
                f"{self._store.location} keeps no folder for the agent of {self._key}: give the "
                "home folder"
            )
            raise ConfigError(message, option="home")
        stack = ExitStack()
        try:
            yield await self._entered(path, stack)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(stack.close)

    async def _entered(self, path: str, stack: ExitStack) -> tuple[Folder, Folder]:
        """Wait for a home that somebody else saves or restores, and enter it."""
        for _ in range(int(self._wait / PAUSE)):
            with suppress(BusyError):
                return await hop(path, stack.enter_context, entered(path))
            await anyio.sleep(PAUSE)
        return await hop(path, stack.enter_context, entered(path))

    # restoring

    async def restore(
        self, name: str | None = None, *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what it was: what came later is gone from it, too.

        What it replaces lies in the home's ``.perdure/replaced`` until the next save or restore.
        Killed at any moment, it has changed nothing, or is finished by whoever comes next.

        Args:
            name: An archive's id, or a label; None: the newest.
            force: Even if the home has files, and was never saved or restored before.
            progress: Called as it goes on.

        Raises:
            ConfigError: There is no such archive, or a link stands in the way.
            CorruptRecordError: A part of the archive is lost or damaged; nothing was changed.
            SessionError: The home has files that are in no archive, or is just being saved.
            StoreUnavailableError: The disk has no room, or refuses.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        where = f"archive {archive.id} of {self._key}"
        async with self._alone() as (home, control):
            replaced: list[str] | None = None
            if not await is_same(home, plan, self._limits):
                await hop(home.path, require_known, home, control, self._key, force, plan)
                replaced = await put_back(
                    self._store, self._key, home, control, plan, where=where, progress=progress
                )
            await hop(home.path, mark, control, await self._as(archive.id))
            return await hop(home.path, restored, archive, home, control, replaced)

    async def resume(self, *, progress: Progress = None) -> ArchiveRestored:
        """Bring the newest archive back at a start, if the home is not it, or newer than it.

        A home that was saved or restored here last, and by nobody elsewhere since, goes on as it
        is: what a killed process has written after its last save is still there. So does one
        that another session of the agent uses, and one that has files and was never saved.
        """
        latest = await self.latest()
        if latest is None:
            return ArchiveRestored(archive=None, changed=False)
        async with self._alone() as (home, control):
            facts = (home, control, self._key, latest, self._selection)
            why = await hop(home.path, why_kept, *facts)
        if why:
            log.info("home kept", extra={"session": str(self._key), "why": why})
            return ArchiveRestored(archive=latest, changed=False, why=f"the home stays: {why}")
        return await self.restore(latest.id, progress=progress)

    async def _as(self, archive: str) -> ArchiveMarker:
        """Return the marker of a home that was made what an archive has, whichever is newest."""
        latest = await self.latest()
        return ArchiveMarker(self._key, archive, () if latest is None else (latest.id,))

    async def verify(self, name: str | None = None) -> Archive:
        """Read all of an archive, and say which it was.

        Raises:
            ConfigError: There is no such archive.
            CorruptRecordError: A part of it is lost or damaged.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        await verify(self._store, self._key, plan, f"archive {archive.id} of {self._key}")
        return archive

    async def _plan(self, archive: Archive) -> ExtractPlan:
        entries_found = entries_of(self._store, self._key, archive, self._limits)
        async with aclosing(entries_found):
            entries = tuple([entry async for entry in entries_found])
        return ExtractPlan(entries, Selection(archive.paths, archive.whole))

    # files of their own

    async def write(self, path: str | os.PathLike[str], name: str | None = None) -> int:
        """Write an archive into a new file, and return the file's size in bytes.

        Args:
            path: Ends in ``.tar.zst``, ``.tar.gz``, ``.tgz`` or ``.tar``.
            name: An archive's id, or a label; None: the newest.

        Raises:
            ConfigError: There is no such archive, the file is there, or its name does not fit.
            MissingExtraError: ``.tar.zst`` needs zstandard.
            CorruptRecordError: A part of the archive is lost or damaged.

        """
        archive = await self.find(name)
        plan = await self._plan(archive)
        return await export(self._store, self._key, archive, plan.entries, Path(path))

    async def read(
        self, path: str | os.PathLike[str], *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what a file of ``write``'s holds; the file need not be trusted.

        No archive is made of it: save one. All else is as for ``restore``.

        Raises:
            ConfigError: It brings hidden folders that are not among ``paths`` here.
            CorruptRecordError: It is no such file, it is damaged, or it has what no archive has.
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
            await hop(home.path, mark, control, await self._as(""))
            return await hop(home.path, restored, None, home, control, replaced)
