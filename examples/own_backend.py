"""A backend of your own: the whole store in one JSON file, locked, and replaced at each change.

Simple, whole and slow: a change costs as much as everything that is kept. It passes the
conformance suite, and docs/own-backend.md walks through it. It keeps a greeting:

    python examples/own_backend.py FILE
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, final

import anyio
import anyio.to_thread
import msgspec

import perdure
from perdure import errors, store
from perdure.records.chunks import fits
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, About, Manifest
from perdure.records.records import EPOCH, Record

T = TypeVar("T")


# What is kept, and what is decided: plain values, no file, no waiting.


class Session(msgspec.Struct):
    """One session; its row stays when it is deleted, so that epochs never start again."""

    key: SessionKey
    epoch: int = 0
    owner: str = ""
    released: bool = False
    deleted: bool = False
    draft: store.Draft | None = None
    unpublished: bool = False
    head: int = 0
    log: list[Record] = []
    manifest: Manifest | None = None
    created_at: float = 0.0
    saved_at: float = 0.0
    turns: int | None = None
    about: About | None = None
    documents: dict[str, bytes] = {}
    inbox: dict[str, store.PendingItem] = {}
    dead_letters: dict[str, store.DeadLetter] = {}


class Owner(msgspec.Struct):
    """A store object that is, or was, open."""

    beat: int = 0
    wanted: list[SessionKey] = []
    mail: list[SessionKey] = []


class Blob(msgspec.Struct):
    """A blob, since when it is there, and since when it is out of the way."""

    data: bytes
    renewed: float
    moved: float | None = None


class Kept(msgspec.Struct):
    """Everything."""

    sessions: list[Session] = []
    owners: dict[str, Owner] = {}
    blobs: dict[str, dict[str, Blob]] = {}

    def find(self, key: SessionKey) -> Session | None:
        return next((one for one in self.sessions if one.key == key), None)

    def made(self, key: SessionKey) -> Session:
        session = self.find(key)
        if session is None:
            session = Session(key)
            self.sessions.append(session)
        return session

    def shown(self, key: SessionKey) -> Session | None:
        session = self.find(key)
        return session if session is not None and is_there(session) else None

    def held(self, key: SessionKey, epoch: int) -> Session:
        session = self.find(key)
        if session is None or session.epoch != epoch or session.deleted or not epoch:
            message = f"epoch {epoch} of {key} may not write: open the session again"
            raise errors.LeaseLostError(message, key=str(key), epoch=epoch)
        return session


def fresh(session: Session, batch: store.Batch, most: int) -> list[Record]:
    """Return what of a batch the log does not hold yet.

    Raises:
        NotStorableError: It will never be accepted.

    """
    largest = max([len(one.payload) for one in batch.records], default=0)
    if largest > most:
        message = f"a record has {largest} bytes, the limit is {most}: keep large values as blobs"
        raise errors.TooLargeError(message, key=str(batch.key), size=largest)
    whole = not batch.records or batch.records[-1].end
    if not 0 < batch.first <= session.head + 1 or not whole:
        message = f"a batch of {batch.key} leaves a gap or half a group: send from the head on"
        raise errors.NotStorableError(message, key=str(batch.key), first=batch.first)
    records = [
        Record(seq, batch.epoch, kind, payload, end)
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first)
    ]
    known = [one for one in session.log if one.seq >= batch.first]
    if known != records[: len(known)]:  # sent again it is the same, under the same epoch
        message = f"the log of {batch.key} holds other records: read its head, append behind it"
        raise errors.NotStorableError(message, key=str(batch.key), first=batch.first)
    return records[session.head + 1 - batch.first :]


def is_there(session: Session) -> bool:
    return session.epoch > 0 and not session.deleted and not session.unpublished


def lease_of(kept: Kept, key: SessionKey) -> store.LeaseState | None:
    session = kept.find(key)
    if session is None or not session.epoch:
        return None
    return store.LeaseState(
        session.epoch,
        session.owner,
        session.released,
        beat=kept.owners.get(session.owner, Owner()).beat,
        deleted=not is_there(session),
        draft=session.draft,
    )


def info_of(session: Session) -> store.SessionInfo:
    manifest, turns, about = session.manifest, session.turns, session.about
    if turns is None and manifest is not None:  # no save has said it
        turns, about = manifest.counters.get("turns", 0), manifest.about
    about = about or About()
    return store.SessionInfo(
        key=session.key,
        epoch=session.epoch,
        head=session.head,
        created_at=session.created_at,
        updated_at=session.saved_at,
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=turns or 0,
    )


# The store.


@final
class OneFileStore:
    """Keep everything in one file. Each call is one step under a lock: whole, or not at all."""

    capabilities = store.Capabilities(durability="fsync", batch_max=64, max_record_bytes=256 * 1024)

    def __init__(self, path: Path, *, owner: str | None = None) -> None:
        self.owner = owner or secrets.token_hex(8)
        self.location = str(path)
        self._path = path

    async def open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._change(self._begin)

    def _begin(self, kept: Kept) -> None:
        me = kept.owners.setdefault(self.owner, Owner())
        me.beat += 1  # another one than before: whoever watched this id sees it live

    async def aclose(self) -> None:
        pass  # a lease that was not released expires, as its owner's beat stands still

    # One step: in a thread that is waited for even when the caller is cancelled.

    async def _change(self, step: Callable[[Kept], T]) -> T:
        return await anyio.to_thread.run_sync(self._step, step)

    async def _look(self, step: Callable[[Kept], T]) -> T:
        return await anyio.to_thread.run_sync(self._step, step, lambda _: None)

    def _step(self, step: Callable[[Kept], T], keep: Callable[[Kept], None] | None = None) -> T:
        try:
            with self._path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = self._load()
                answer = step(kept)
                (keep or self._save)(kept)
                return answer
        except OSError as error:
            message = f"cannot use {self.location}: {error.strerror}: look at the disk"
            raise errors.StoreUnavailableError(message, path=self.location) from error

    def _load(self) -> Kept:
        if not self._path.exists():
            return Kept()
        check, _, body = self._path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != check:
            message = f"{self.location} is damaged: restore it from a copy"
            raise errors.CorruptRecordError(message, path=self.location)
        return msgspec.json.decode(body, type=Kept)

    def _save(self, kept: Kept) -> None:
        body = msgspec.json.encode(kept)
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    # the log

    async def append_many(self, batches: Sequence[store.Batch]) -> list[store.Outcome]:
        try:
            return await self._change(lambda kept: [self._append(kept, one) for one in batches])
        except errors.StoreUnavailableError as error:
            return [store.Outcome(store.Status.IN_DOUBT, error)] * len(batches)

    def _append(self, kept: Kept, batch: store.Batch) -> store.Outcome:
        try:
            session = kept.held(batch.key, batch.epoch)
            session.log += fresh(session, batch, self.capabilities.max_record_bytes)
        except errors.LeaseLostError as error:
            return store.Outcome(store.Status.CONFLICT, error)
        except errors.NotStorableError as error:
            return store.Outcome(store.Status.PERMANENT, error)
        session.head = max(session.head, batch.first + len(batch.records) - 1)
        session.saved_at = time.time()  # for the directory, in the same step
        session.turns = session.turns if batch.turns is None else batch.turns
        session.about = batch.about or session.about
        return store.Outcome(
            store.Status.OK, written=sum(len(one.payload) for one in batch.records)
        )

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[store.LogChunk, None]:
        session = await self._look(lambda kept: kept.shown(key))
        log = session.log if session is not None else []
        found = [one for one in log if one.seq > after and (before is None or one.seq < before)]
        found = (found[::-1] if reverse else found)[:limit]
        for start in range(0, len(found), 100):
            yield store.LogChunk(tuple(found[start : start + 100]))

    async def head(self, key: SessionKey) -> int:
        session = await self._look(lambda kept: kept.shown(key))
        return session.head if session is not None else 0

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        def step(kept: Kept) -> int:
            session = kept.held(key, epoch)
            gone = [one for one in session.log if one.seq < below]
            session.log = session.log[len(gone) :]
            return sum(len(one.payload) for one in gone)

        return await self._change(step)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> store.Documents:
        session = await self._look(lambda kept: kept.shown(key))
        manifest = session.manifest if session is not None else None
        if session is None or manifest is None:
            return store.Documents()
        if manifest.format > FORMAT:
            message = f"the manifest of {key} is of a newer format: use a newer release"
            raise errors.UnsupportedVersionError(message, key=str(key), format=manifest.format)
        found: dict[str, store.Document] = {}
        damaged: list[str] = []
        for name, folded in manifest.documents.items():
            data = session.documents.get(name)
            if names is not None and name not in names:
                continue
            if data is None or hashlib.sha256(data).hexdigest() != folded.sha256:
                damaged.append(name)
            else:
                found[name] = store.Document(data, folded.as_of_seq)
        return store.Documents(manifest, found, tuple(damaged))

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        def step(kept: Kept) -> None:
            session = kept.held(key, manifest.epoch)
            all_ = {**session.documents, **documents}
            session.documents = {name: all_[name] for name in manifest.documents if name in all_}
            session.manifest = manifest
            if manifest.as_of_seq >= session.head:
                session.turns = session.about = None

        await self._change(step)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        def step(kept: Kept) -> None:
            for name, data in blobs.items():
                if not fits(name, data):
                    raise errors.NotStorableError(
                        f"blob {name!r} does not match its name: hash it again"
                    )
                kept.blobs.setdefault(tenant, {})[name] = Blob(data, time.time())

        await self._change(step)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        blob = await self._look(lambda kept: kept.blobs.get(tenant, {}).get(name))
        return blob.data if blob is not None else None

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> store.BlobSweep:
        def step(kept: Kept) -> store.BlobSweep:
            now = time.time()
            quarantined = removed = freed = 0
            blobs = kept.blobs.get(tenant, {})
            for name, blob in list(blobs.items()):
                if among is not None and name not in among:
                    continue
                if name in reachable:
                    blob.moved = None
                elif blob.moved is None and now - blob.renewed >= older_than:
                    blob.moved = now
                    quarantined += 1
                elif blob.moved is not None and now - blob.moved >= older_than:
                    removed, freed = removed + 1, freed + len(blobs.pop(name).data)
            return store.BlobSweep(quarantined, removed, freed)

        return await self._change(step)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        def step(kept: Kept) -> set[str]:
            blobs = kept.blobs.get(tenant, {})
            for name in set(names) & set(blobs):
                blobs[name].renewed, blobs[name].moved = time.time(), None
            return set(names) - set(blobs)

        return await self._change(step)

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._look(lambda kept: sorted(kept.blobs.get(tenant, ())))

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        def step(kept: Kept) -> int:
            blobs = kept.blobs.get(tenant, {})
            return sum(len(blobs.pop(name).data) for name in set(names) & set(blobs))

        return await self._change(step)

    # leases

    async def holder(self, key: SessionKey) -> store.LeaseState | None:
        return await self._look(lambda kept: lease_of(kept, key))

    async def acquire(self, key: SessionKey, terms: store.Terms) -> store.Held | store.Taken:
        def step(kept: Kept) -> store.Held | store.Taken:
            holder = lease_of(kept, key)
            if not terms.allows(holder):
                return store.Held(holder)
            session, new = kept.made(key), terms.beginning
            created = not is_there(session)
            if created:  # an unpublished draft goes; what was posted stays
                inbox = session.inbox
                kept.sessions.remove(session)
                session = kept.made(key)
                session.inbox, session.head = inbox, new.first - 1
                session.draft, session.unpublished = new.draft, new.draft is not None
                session.created_at = session.saved_at = time.time()
                if new.about is not None:
                    session.turns, session.about = 0, new.about
            session.epoch, session.owner = 1 + (holder.epoch if holder else 0), self.owner
            session.released = session.deleted = False
            session.head += 1
            begun: dict[str, object] = {"owner": self.owner}
            if created and new.base is not None:
                begun["base"] = new.base
            payload = msgspec.json.encode(begun)
            session.log.append(Record(session.head, session.epoch, EPOCH, payload, end=True))
            return store.Taken(key, session.epoch, session.head, created, payload)

        return await self._change(step)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        def step(kept: Kept) -> None:
            kept.held(key, epoch).unpublished = False

        await self._change(step)

    async def drafts(self, tenant: str) -> list[store.DraftInfo]:
        kept = await self._look(lambda kept: kept)
        found = [
            store.DraftInfo(one.key, one.epoch, one.draft, one.owner)
            for one in kept.sessions
            if one.key.tenant == tenant and one.unpublished and one.draft is not None
        ]
        return sorted(found, key=lambda one: one.key)

    async def release(self, key: SessionKey, epoch: int) -> None:
        def step(kept: Kept) -> None:
            for session in [one for one in kept.sessions if (one.key, one.epoch) == (key, epoch)]:
                session.released = True

        await self._change(step)

    async def heartbeat(self) -> store.HeartbeatRequests:
        def step(kept: Kept) -> store.HeartbeatRequests:
            me = kept.owners.setdefault(self.owner, Owner())
            asked = store.HeartbeatRequests(tuple(me.wanted), tuple(me.mail))
            me.beat, me.wanted, me.mail = me.beat + 1, [], []
            return asked

        return await self._change(step)

    async def wait_for_notification(self, timeout: float) -> None:
        await anyio.sleep(timeout)

    async def request_handover(self, key: SessionKey, holder: store.LeaseState) -> None:
        def step(kept: Kept) -> None:
            owner = kept.owners.get(holder.owner)
            if owner is not None and key not in owner.wanted:
                owner.wanted.append(key)

        await self._change(step)

    # inbox

    async def enqueue(
        self,
        key: SessionKey,
        items: Sequence[store.PendingItem],
        *,
        limit: store.InboxLimit | None = None,
    ) -> int:
        def step(kept: Kept) -> int:
            session = kept.made(key)
            before = len(session.inbox)
            if limit is not None:
                new = {i.op_id: len(i.payload) for i in items if i.op_id not in session.inbox}
                size = sum(len(item.payload) for item in session.inbox.values())
                limit.require_room(
                    key, waiting=before, size=size, new=len(new), added=sum(new.values())
                )
            for item in items:
                session.inbox.setdefault(item.op_id, item)
            owner = kept.owners.get(session.owner)
            if owner is not None and key not in owner.mail:
                owner.mail.append(key)
            return len(session.inbox) - before

        return await self._change(step)

    async def receive(
        self, key: SessionKey, epoch: int, *, limit: int = 100
    ) -> list[store.PendingItem]:
        def step(kept: Kept) -> list[store.PendingItem]:
            session = kept.find(key) or Session(key)
            if session.epoch != epoch:
                message = f"epoch {epoch} of {key} is over: ask again who holds the session"
                raise errors.LeaseLostError(message, key=str(key), epoch=epoch)
            return [*session.inbox.values()][:limit]

        return await self._look(step)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[store.DeadLetter] = (),
    ) -> None:
        def step(kept: Kept) -> None:
            session = kept.find(key) if epoch is None else kept.held(key, epoch)
            if session is None:
                return
            letters = {letter.item.op_id: letter for letter in dead}
            session.dead_letters |= letters
            items = session.dead_letters if epoch is None else session.inbox
            for op_id in (*op_ids, *letters):
                items.pop(op_id, None)

        await self._change(step)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        kept = await self._look(lambda kept: kept)
        return sorted(
            one.key for one in kept.sessions if (one.dead_letters if dead_letters else one.inbox)
        )

    async def dead_letters(self, key: SessionKey) -> list[store.DeadLetter]:
        session = await self._look(lambda kept: kept.find(key))
        letters = [] if session is None else [*session.dead_letters.values()]
        return sorted(letters, key=lambda letter: letter.at)

    # directory

    async def sessions(self, query: store.SessionQuery = store.ALL) -> list[store.SessionInfo]:
        kept = await self._look(lambda kept: kept)
        there = [one for one in kept.sessions if one.key.tenant == query.tenant and is_there(one)]
        return query.page(map(info_of, there))

    async def tenants(self) -> list[str]:
        kept = await self._look(lambda kept: kept)
        there = {one.key.tenant for one in kept.sessions if is_there(one) or one.inbox}
        return sorted(there | {tenant for tenant, blobs in kept.blobs.items() if blobs})

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        def step(kept: Kept) -> None:
            gone = kept.held(key, epoch)
            kept.sessions.remove(gone)
            left = Session(key, epoch, owner=gone.owner, released=True, deleted=True)
            left.inbox = gone.inbox if gone.unpublished or keep_posts else {}
            kept.sessions.append(left)

        await self._change(step)

    async def scrub(self) -> None:
        pass  # every change writes the file anew, without what was removed


async def main(path: Path) -> None:
    async with (
        perdure.connect(OneFileStore(path)) as sessions,
        sessions.open("greeter") as session,
        session.turn(),
    ):
        session.append(perdure.Message.user("Hello, file!"))
        print(f"{path.name} holds {len(session.context())} messages now.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/own_backend.py FILE")
    anyio.run(main, Path(sys.argv[1]))
