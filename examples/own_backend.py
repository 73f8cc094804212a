"""A backend of your own: the whole store in one JSON file, locked, and replaced at each change.

Simple, whole and slow: a change costs as much as everything that is kept. It passes the
conformance suite, and docs/own-backend.md walks through it. It keeps a greeting:

    python examples/own_backend.py FILE
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import anyio
import anyio.to_thread
import msgspec

import perdure
from perdure import errors, store
from perdure.records.keys import SessionKey

P = ParamSpec("P")
T = TypeVar("T")


class Owner(msgspec.Struct):
    """A store object that is, or was, open."""

    beat: int = 0
    wanted: list[SessionKey] = []
    mail: list[SessionKey] = []


class Kept(msgspec.Struct):
    """Everything. `store.StoredSession` and `store.StoredBlob` know the rules for one of each."""

    sessions: list[store.StoredSession] = []
    owners: dict[str, Owner] = {}
    blobs: dict[str, dict[str, store.StoredBlob]] = {}

    def find(self, key: SessionKey) -> store.StoredSession:
        """Return a session; one of the epoch 0 if there was never one."""
        new = store.StoredSession(key)
        return next((session for session in self.sessions if session.key == key), new)

    def make(self, key: SessionKey) -> store.StoredSession:
        """Return a session, which is kept from now on."""
        session = self.find(key)
        if session not in self.sessions:
            self.sessions.append(session)
        return session

    def lease(self, key: SessionKey) -> store.LeaseState | None:
        session = self.find(key)
        return session.lease(beat=self.owners.get(session.owner, Owner()).beat)


def one_step(
    step: Callable[Concatenate[OneFileStore, Kept, P], T],
) -> Callable[Concatenate[OneFileStore, P], Coroutine[Any, Any, T]]:
    """Make a method whole or nothing, in a thread that is waited for even if it is cancelled."""

    @functools.wraps(step)
    async def method(self: OneFileStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await anyio.to_thread.run_sync(
            self.run_locked, lambda kept: step(self, kept, *args, **kwargs)
        )

    return method


@final
class OneFileStore:
    """Keep everything in one file. Each call is one step under a lock: whole, or not at all."""

    capabilities = store.Capabilities(durability="fsync", batch_max=64, max_record_bytes=256 * 1024)

    def __init__(self, path: Path, *, owner: str | None = None) -> None:
        self.owner = owner or secrets.token_hex(8)
        self.location = str(path)
        self._path = path

    def run_locked(self, step: Callable[[Kept], T]) -> T:
        """Load everything, take the step, and replace the file if that has changed anything."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                before = self._load()
                kept = msgspec.json.decode(before, type=Kept)
                answer = step(kept)
                after = msgspec.json.encode(kept)
                if after != before:
                    self._replace(after)
                return answer
        except OSError as error:
            message = f"cannot use {self.location}: {error.strerror}: look at the disk"
            raise errors.StoreUnavailableError(message, path=self.location) from error

    def _load(self) -> bytes:
        if not self._path.exists():
            return b"{}"
        check, _, body = self._path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != check:
            message = f"{self.location} is damaged: restore it from a copy"
            raise errors.CorruptRecordError(message, path=self.location)
        return body

    def _replace(self, body: bytes) -> None:
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    @one_step
    def open(self, kept: Kept) -> None:
        # Another beat than before: whoever watched this owner sees it live.
        kept.owners.setdefault(self.owner, Owner()).beat += 1

    async def aclose(self) -> None:
        pass  # a lease that was not released expires, as its owner's beat stands still

    async def scrub(self) -> None:
        pass  # every change writes the file anew, without what was removed

    # the log

    async def append_many(self, batches: Sequence[store.Batch]) -> list[store.Outcome]:
        try:
            return await self._append(batches)
        except errors.StoreUnavailableError as error:
            return [store.Outcome(store.Status.IN_DOUBT, error)] * len(batches)

    @one_step
    def _append(self, kept: Kept, batches: Sequence[store.Batch]) -> list[store.Outcome]:
        now, most = time.time(), self.capabilities.max_record_bytes
        return [kept.find(batch.key).append(batch, now, max_bytes=most) for batch in batches]

    @one_step
    def _find(self, kept: Kept, key: SessionKey) -> store.StoredSession:
        return kept.find(key)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[store.LogChunk, None]:
        session = await self._find(key)
        log = session.read_log(after=after, before=before, limit=limit, reverse=reverse)
        while chunk := tuple(itertools.islice(log, 100)):
            yield store.LogChunk(chunk)

    @one_step
    def head(self, kept: Kept, key: SessionKey) -> int:
        session = kept.find(key)
        return session.head if session.is_public else 0

    @one_step
    def trim(self, kept: Kept, key: SessionKey, epoch: int, below: int) -> int:
        return kept.find(key).trim(epoch, below)

    # documents

    @one_step
    def read_documents(
        self, kept: Kept, key: SessionKey, names: Collection[str] | None = None
    ) -> store.Documents:
        return kept.find(key).read_documents(names)

    @one_step
    def write_documents(
        self,
        kept: Kept,
        key: SessionKey,
        documents: Mapping[str, bytes],
        manifest: store.Manifest,
    ) -> None:
        kept.find(key).write_documents(documents, manifest)

    # blobs

    @one_step
    def put_blobs(self, kept: Kept, tenant: str, blobs: Mapping[str, bytes]) -> None:
        store.require_named(blobs)
        for name, data in blobs.items():
            kept.blobs.setdefault(tenant, {})[name] = store.StoredBlob(data, time.time())

    @one_step
    def get_blob(self, kept: Kept, tenant: str, name: str) -> bytes | None:
        blob = kept.blobs.get(tenant, {}).get(name)
        return None if blob is None else store.verified(name, blob.data)

    @one_step
    def sweep(
        self,
        kept: Kept,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> store.BlobSweep:
        blobs = kept.blobs.get(tenant, {})
        return store.sweep_blobs(blobs, reachable, older_than, now=time.time(), among=among)

    @one_step
    def renew(self, kept: Kept, tenant: str, names: Collection[str]) -> set[str]:
        return store.renew_blobs(kept.blobs.get(tenant, {}), names, now=time.time())

    @one_step
    def blob_names(self, kept: Kept, tenant: str) -> list[str]:
        return sorted(kept.blobs.get(tenant, ()))

    @one_step
    def remove_blobs(self, kept: Kept, tenant: str, names: Collection[str]) -> int:
        return store.remove_blobs(kept.blobs.get(tenant, {}), names)

    # leases

    @one_step
    def holder(self, kept: Kept, key: SessionKey) -> store.LeaseState | None:
        return kept.lease(key)

    @one_step
    def acquire(self, kept: Kept, key: SessionKey, terms: store.Terms) -> store.Held | store.Taken:
        holder = kept.lease(key)
        if not terms.allows(holder):
            return store.Held(holder)
        return kept.make(key).acquire(terms, time.time())

    @one_step
    def publish(self, kept: Kept, key: SessionKey, epoch: int) -> None:
        kept.find(key).publish(epoch)

    @one_step
    def drafts(self, kept: Kept, tenant: str) -> list[store.DraftInfo]:
        drafts = [
            store.DraftInfo(session.key, session.epoch, session.draft, session.owner)
            for session in kept.sessions
            if session.key.tenant == tenant and session.draft and not session.published
        ]
        return sorted(drafts, key=lambda draft: draft.key)

    @one_step
    def release(self, kept: Kept, key: SessionKey, epoch: int) -> None:
        kept.find(key).release(epoch)

    @one_step
    def heartbeat(self, kept: Kept) -> store.HeartbeatRequests:
        me = kept.owners.setdefault(self.owner, Owner())
        requests = store.HeartbeatRequests(tuple(me.wanted), tuple(me.mail))
        kept.owners[self.owner] = Owner(me.beat + 1)
        return requests

    async def wait_for_notification(self, timeout: float) -> None:
        await anyio.sleep(timeout)

    @one_step
    def request_handover(self, kept: Kept, key: SessionKey, holder: store.LeaseState) -> None:
        owner = kept.owners.get(holder.owner)
        if owner is not None and key not in owner.wanted:
            owner.wanted.append(key)

    # inbox

    @one_step
    def enqueue(
        self,
        kept: Kept,
        key: SessionKey,
        items: Sequence[store.PendingItem],
        *,
        limit: store.InboxLimit | None = None,
    ) -> int:
        session = kept.make(key)
        new = session.enqueue(items, limit)
        owner = kept.owners.get(session.owner)
        if owner is not None and key not in owner.mail:
            owner.mail.append(key)
        return new

    @one_step
    def receive(
        self, kept: Kept, key: SessionKey, epoch: int, *, limit: int = 100
    ) -> list[store.PendingItem]:
        return kept.find(key).receive(epoch, limit)

    @one_step
    def ack(
        self,
        kept: Kept,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[store.DeadLetter] = (),
    ) -> None:
        kept.find(key).ack(epoch, op_ids, dead)

    @one_step
    def dead_letters(self, kept: Kept, key: SessionKey) -> list[store.DeadLetter]:
        return kept.find(key).letters()

    @one_step
    def sessions_with_pending_items(
        self, kept: Kept, *, dead_letters: bool = False
    ) -> list[SessionKey]:
        return sorted(
            session.key
            for session in kept.sessions
            if (session.dead_letters if dead_letters else session.inbox)
        )

    # directory

    @one_step
    def sessions(
        self, kept: Kept, query: store.SessionQuery = store.ALL
    ) -> list[store.SessionInfo]:
        there = [session for session in kept.sessions if session.is_public]
        return query.page(session.info for session in there if session.key.tenant == query.tenant)

    @one_step
    def tenants(self, kept: Kept) -> list[str]:
        there = {session.key.tenant for session in kept.sessions if session.is_public}
        return sorted(there | {tenant for tenant, blobs in kept.blobs.items() if blobs})

    @one_step
    def delete(self, kept: Kept, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        kept.find(key).delete(epoch, keep_posts=keep_posts)


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
