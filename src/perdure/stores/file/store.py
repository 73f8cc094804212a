"""What is done to one session in one hop, besides appending: folding, and letting go of it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple, final

from perdure._lib.files import Folder, store_errors
from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure._lib.platform import synced_by
from perdure._lib.tasks import all_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import (
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    HeartbeatRequests,
    HeldLease,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    past_damage,
)
from perdure.stores.file import directory, inbox, leases, log, reader
from perdure.stores.file.blobs import blob_names, get, put, remove_blobs, sweep
from perdure.stores.file.held_sessions import (
    HeldSessions,
    PendingAcquire,
    delete,
    read_documents,
    release,
    write_documents,
)
from perdure.stores.file.home import PARALLELISM, Home, open_home, resolve_root, settled
from perdure.stores.file.layout import session_path
from perdure.stores.file.log import MAX_RECORD_BYTES, LogWriter
from perdure.stores.file.owners import Owners
from perdure.stores.file.reader import LogStream
from perdure.stores.file.salvage import readable, run_of

# What is done to one session in one hop, besides appending: folding, and letting go of it


# The file store: the port of `perdure.store` on a folder of readable files
#
# Use it from the event loop that opened it. Each call does its blocking work in one hop into a
# thread of its own limiter; a session's writes also wait for an abandoned one of theirs, without
# holding a thread. Cancelling a call abandons its thread, which goes on to its end and leaves the
# session's state whole.


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CAPABILITIES = Capabilities(
    durability="fsync" if synced_by()[1] else "fsync of files, not of folders",
    batch_max=1,
    parallelism=PARALLELISM,
    max_record_bytes=MAX_RECORD_BYTES,
    dead_letters=True,
)

_BEHIND = 2**62
"""A seq behind every log."""


@final
class FileStore:
    """Keep sessions in a folder: readable, private, durable to the disk.

    Args:
        root: The folder; by default ``PERDURE_HOME``, else the per-user data folder. Looked
            up when the store is opened. Its parent must be there, and nobody else may be
            able to write to it.
        owner: This store's id as a holder of leases; by default one that nobody can guess.

    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, owner: str | None = None
    ) -> None:
        self._wanted = root
        self._owner = owner or random_id()
        self._opened: Home | None = None
        self._holding = HeldSessions()

    @property
    def capabilities(self) -> Capabilities:
        """What this store is."""
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        """The id of this store object as a holder of leases."""
        return self._owner

    @property
    def location(self) -> str:
        """The folder."""
        return self._opened.root.path if self._opened else resolve_root(self._wanted)[0]

    @property
    def local_path(self) -> str:
        """The folder, which may not be there yet."""
        return self.location

    def folder_of(self, key: SessionKey) -> str:
        """Return the folder of a session's agent, whether it is there or not."""
        return os.path.join(self.location, *session_path(SessionKey(key.agent, tenant=key.tenant)))

    async def open(self) -> None:
        """Open the folder, make it if only it is missing, and become known as an owner.

        Raises:
            ConfigError: It is no folder, or others can write to it.
            StoreUnavailableError: It cannot be made, read or written.

        """
        if not self._opened:
            self._opened = await open_home(self._wanted, self._owner)

    async def open_read_only(self) -> None:
        """Open a folder that is there to read it; nothing is written, not even who reads.

        Raises:
            ConfigError: It is no folder, or others can write to it.
            StoreUnavailableError: It is not there, or cannot be read.

        """
        if not self._opened:
            self._opened = await open_home(self._wanted, self._owner, read_only=True)

    async def aclose(self) -> None:
        """Close every file; leases that were not released look like a dead owner's."""
        here, self._opened = self._opened, None
        self._holding.clear()
        if here is not None and here.mine:
            await here.aclose()

    async def _hop(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self._here.hop(doing, function, *args)

    @property
    def _here(self) -> Home:
        return self._require_open()

    def _require_open(self) -> Home:
        here = self._opened
        if here is not None and here.mine:
            return here
        raise unopened(self.location, elsewhere=here is not None)

    @property
    def _root(self) -> Folder:
        return self._here.root

    @property
    def _owners(self) -> Owners:
        return self._here.owners

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in a thread of its own."""
        return await all_of(batches, partial(self._holding.append, self._opened))

    def begin_append(self, batch: Batch, done: Callable[[Outcome], object]) -> bool:
        """Append one batch without a task: ``done`` is called later. False: use append_many."""
        return self._holding.begin_append(self._opened, batch, done)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records from the files, a part at a time."""
        if past_damage.get() and not reverse:
            whole = await self._hop("read", readable, self._root, key)
            for record in itertools.islice(run_of(key, whole, after, before), limit):
                yield LogChunk((record,))
            return
        found = await self._plan(key, after, before)
        stream = LogStream(self._root, key, found, reverse=reverse)
        last = before if before is not None else found.head + 1
        left, told = (found.head if limit is None else limit), found.settled
        while left > 0:
            with store_errors("read", self.location):
                part = await stream.part()
            if part is None:
                break
            records = [record for record in part if after < record.seq < last][:left]
            if records:
                left -= len(records)
                told = True
                yield LogChunk(tuple(records), found.settled)
            if part and (part[-1].seq <= after + 1 if reverse else part[-1].seq >= last - 1):
                break  # nothing that is asked for comes behind
        if not told:
            yield LogChunk((), settled=False)

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        if past_damage.get():
            _, records = await self._hop("read", readable, self._root, key)
            return records[-1].seq if records else 0
        return (await self._plan(key, _BEHIND, None)).head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the log's files that lie wholly below a record."""
        return await self._hop("trim", log.trim, await self._idle(key, epoch), below)

    async def _plan(self, key: SessionKey, after: int, before: int | None) -> reader.ReadPlan:
        async def look() -> reader.ReadPlan:
            held = self._holding.durable(key)
            return await self._hop(
                "read", reader.plan, self._root, key, after, before, held, self._owners
            )

        return await settled(look)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        held = key in self._holding
        return await self._hop("read", read_documents, self._root, key, names, held)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold: documents first, the manifest last."""
        writer = await self._idle(key, manifest.epoch)
        await self._hop("write", write_documents, writer, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._hop("write", put, self._root, tenant, dict(blobs), time.time())

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none."""
        return await self._hop("read", get, self._root, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        return await self._hop(
            "sweep", sweep, self._root, tenant, frozenset(reachable), older_than, time.time()
        )

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._hop("read", blob_names, self._root, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._hop("delete", remove_blobs, self._root, tenant, frozenset(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Say who has the session; None when nobody ever had."""
        return await self._hop("read", leases.look, self._root, key, self._owners)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        claim = PendingAcquire()
        try:
            return await self._hop("write", self._holding.take, self._here, key, after, claim)
        except BaseException:
            self._holding.abandon(claim)
            raise

    async def release(self, key: SessionKey, epoch: int) -> None:
        self._require_open()
        if self._holding.of(key, epoch) is not None:
            writer = await self._idle(key, epoch)
            self._holding.drop(writer)
            await self._hop("write", release, writer)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and empty its letter box."""
        return await self._here.beat()

    async def news(self, at_most: float) -> None:
        """Return when somebody has left a letter, or after ``at_most`` seconds."""
        await self._owners.wait_letter(at_most)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        await self._hop("write", self._owners.ask, holder.owner, key)

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._hop(
            "write", inbox.post, self._root, self._owners, key, tuple(items), limit
        )

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        self._require_open()
        if self._holding.of(key, epoch) is None:  # somebody who only reads knows the epoch, too
            return await self._hop("read", inbox.look, self._root, key, epoch, limit)
        return await self._hop("read", inbox.take, await self._idle(key, epoch), limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        writer = await self._idle(key, epoch)
        await self._hop("write", inbox.settle, writer, frozenset(op_ids))

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        look = partial(directory.list_waiting, dead_letters=dead_letters)
        return await self._hop("read", look, self._root)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._hop("write", inbox.reject, await self._idle(key, epoch), tuple(letters))

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._hop("read", inbox.dead_letters, self._root, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._hop("write", inbox.drop_dead_letters, self._root, key, set(op_ids))

    # directory

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        wanted = directory.FileListQuery(tenant, owner, tag, prefix)
        return await self._hop("read", directory.list_sessions, self._root, wanted, after, limit)

    async def tenants(self) -> list[str]:
        return await self._hop("read", directory.list_tenants, self._root)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        writer = await self._idle(key, epoch)
        self._holding.drop(writer)
        await self._hop("delete", delete, writer, self._owners.me)

    async def scrub(self) -> None:
        """End what was cut short: deletions, heartbeats. A file that was removed is gone."""
        await self._hop("clean", directory.end_deletions, self._root)
        await self._hop("clean", self._owners.tidy)

    async def _idle(self, key: SessionKey, epoch: int) -> LogWriter:
        self._require_open()
        return await self._holding.idle(key, epoch)
