"""Holders, takers and readers of one session on a bucket in memory, in every order.

Each request is one step. A scheduler decides who makes the next one, for how long the others
stand still, who is killed, whose answer is lost, and which write arrives long after its sender has
given it up. All from one seed.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec

from perdure.errors import (
    CorruptRecordError,
    LeaseError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest, lease_held
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Held, Status, Terms
from perdure.stores.objects import documents, leases, reader
from perdure.stores.objects.bucket import ListedObject, StoredObject
from perdure.stores.objects.log import ObjectLogWriter

KEY = SessionKey("agent")


class Killed(BaseException):
    """The process is no more."""


class Actor:
    """A process: a thread that makes a step when it is told to."""

    def __init__(self, name: str, life: Callable[[Actor], None]) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.done = False
        self.killed = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(life,), daemon=True)

    def _run(self, life: Callable[[Actor], None]) -> None:
        try:
            self.step()
            life(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.back.release()

    def step(self) -> None:
        """Wait until it is this process's turn."""
        if self.killed:
            raise Killed
        self.back.release()
        assert self.go.acquire(timeout=60)
        if self.killed:
            raise Killed


class World:
    """The bucket's objects, and what the network does."""

    def __init__(self, seed: int, *, faults: float) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.late: list[Callable[[], object]] = []
        self.actors: list[Actor] = []
        self.count = 0
        self.trace: list[str] = []

    def tag(self) -> str:
        self.count += 1
        return f'"{self.count}"'

    def create(self, name: str, data: bytes) -> str | None:
        if name in self.objects:
            return None
        return self.put(name, data)

    def put(self, name: str, data: bytes) -> str:
        tag = self.tag()
        self.objects[name] = (data, tag)
        return tag

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        if name not in self.objects or self.objects[name][1] != tag:
            return None
        return self.put(name, data)

    def start(self, name: str, life: Callable[[Actor], None]) -> Actor:
        actor = Actor(name, life)
        self.actors.append(actor)
        actor.thread.start()
        assert actor.back.acquire(timeout=60)
        return actor

    def run(self, *, kills: int) -> None:
        """Let the actors live until all are done."""
        while running := [actor for actor in self.actors if not actor.done]:
            actor = self.random.choice(running)
            for _ in range(self.random.choice((1, 1, 2, 3, 5, 8, 13, 40))):
                if self.late and self.random.random() < 0.1:
                    self.late.pop(self.random.randrange(len(self.late)))()
                if kills and self.random.random() < 0.01:
                    kills -= 1
                    actor.killed = True
                actor.go.release()
                assert actor.back.acquire(timeout=60)
                if actor.done:
                    break
        for write in self.late:
            write()
        for actor in self.actors:
            actor.thread.join(60)
            if actor.error is not None:
                raise actor.error


class Requests:
    """`perdure.stores.s3.Bucket` for one actor, or for nobody in particular."""

    def __init__(self, world: World, actor: Actor | None = None) -> None:
        self.world = world
        self.actor = actor

    def _step(self, what: str, name: str) -> None:
        if self.actor is not None:
            self.world.trace.append(f"{self.actor.name} {what} {name}")
            self.actor.step()

    def many(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]

    def get(self, name: str) -> StoredObject | None:
        self._step("get", name)
        found = self.world.objects.get(name)
        return None if found is None else StoredObject(*found)

    def part(self, name: str, start: int, end: int) -> bytes | None:
        found = self.get(name)
        data = b"" if found is None else found.data[start:end]
        return data if len(data) == end - start else None

    def stat(self, name: str) -> ListedObject | None:
        found = self.get(name)
        return None if found is None else ListedObject(name, len(found.data), 0.0)

    def listed(self, prefix: str, after: str | None = None) -> list[ListedObject]:
        """In pages of three: a listing is no snapshot."""
        found: list[ListedObject] = []
        last = after or ""
        while True:
            self._step("list", prefix)
            names = sorted(n for n in self.world.objects if n.startswith(prefix) and n > last)[:3]
            if not names:
                return found
            found += [ListedObject(n, len(self.world.objects[n][0]), 0.0) for n in names]
            last = names[-1]

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        yield self.listed(prefix, after)

    def create(self, name: str, data: bytes) -> str | None:
        return self._write("create", name, lambda: self.world.create(name, data))

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return self._write("replace", name, lambda: self.world.replace(name, data, tag))

    def put(self, name: str, data: bytes) -> None:
        self._write("put", name, lambda: self.world.put(name, data))

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self._write("remove", name, lambda name=name: self.world.objects.pop(name, None))

    def _write(self, what: str, name: str, write: Callable[[], Any]) -> Any:
        self._step(what, name)
        if self.actor is None or self.world.random.random() >= self.world.faults:
            return write()
        kind = self.world.random.choice(("refused", "lost", "late"))
        self.world.trace.append(f"  {kind}")
        if kind == "refused":
            raise StoreUnavailableError("busy", unwritten=True)
        if kind == "lost":
            write()
        else:
            self.world.late.append(write)
        raise StoreUnavailableError("no answer in time", unwritten=False)


class Story:
    """What the holders of one session did, and what they were told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acked: list[tuple[int, str]] = []
        """Epoch and text of what was reported durable."""
        self.sent: set[str] = set()
        self.wiped = 0
        """Everything up to this epoch may have been deleted."""
        self.folds: list[tuple[int, str]] = []

    def holder(self, *, appends: int, deletes: bool = False) -> Callable[[Actor], None]:
        def life(actor: Actor) -> None:
            bucket: Any = Requests(self.world, actor)
            writer = self._take(bucket, actor)
            if writer is not None:
                self._work(bucket, actor, writer, appends, deletes=deletes)

        return life

    def _take(self, bucket: Any, actor: Actor) -> ObjectLogWriter | None:
        for _ in range(3):
            try:
                seen = reader.read_head(bucket, KEY)
                after = 0 if seen is None else seen[0].epoch
                if self.world.random.random() < 0.3:
                    self.world.trace.append(f"{actor.name} dawdles")
                    actor.step()
                acquired = acquire(bucket, after, actor.name)
                _check_what_was_read(bucket, acquired)
                return acquired.writer
            except (LeaseError, StoreUnavailableError):
                continue
        return None

    def _work(
        self, bucket: Any, actor: Actor, writer: ObjectLogWriter, appends: int, *, deletes: bool
    ) -> None:
        self.world.trace.append(f"{actor.name} has epoch {writer.epoch} from {writer.epoch_seq}")
        first, waiting = writer.epoch_seq + 1, []
        for number in range(appends):
            waiting.append(f"{writer.epoch}.{number}")
            self.sent.add(waiting[-1])
            if self.world.random.random() < 0.3:
                continue  # two records in one batch
            done = self._append(bucket, writer, first, waiting)
            if done is None:
                return
            if done:
                first += len(waiting)
                waiting = []
                if self.world.random.random() < 0.3 and not self._fold(bucket, writer):
                    return
        self._end(bucket, writer, deletes=deletes)

    def _append(
        self, bucket: Any, writer: ObjectLogWriter, first: int, texts: list[str]
    ) -> bool | None:
        """Append; True for OK, False for not yet, None for never."""
        records = tuple(Entry(MESSAGE, msgspec.json.encode(text)) for text in texts)
        batch = Batch(KEY, writer.epoch, first, records)

        for _ in range(2):
            outcome = writer.append(batch)
            self.world.trace.append(f"  {texts} at {first}: {outcome.status.value}")
            if outcome.status is Status.OK:
                self.acked += [(writer.epoch, text) for text in texts]
                return True
            if outcome.status is Status.CONFLICT:
                return None
            assert outcome.status is not Status.PERMANENT, outcome.error
        return False

    def _fold(self, bucket: Any, writer: ObjectLogWriter) -> bool:
        """Write what the log amounts to; False when the lease is lost."""
        upto = writer.head
        try:
            data = msgspec.json.encode(texts_of(bucket, upto))
            folded = FoldedDocument(upto, hashlib.sha256(data).hexdigest(), len(data))
            manifest = Manifest(
                key=KEY, epoch=writer.epoch, as_of_seq=upto, documents={"session.json": folded}
            )
            documents.fold(bucket, writer, {"session.json": data}, manifest)
        except LeaseError:
            return False
        except StoreUnavailableError:
            return True
        self.world.trace.append(f"  folded up to {upto}")
        return True

    def _end(self, bucket: Any, writer: ObjectLogWriter, *, deletes: bool) -> None:
        try:
            if deletes and self.world.random.random() < 0.5:
                self.wiped = max(self.wiped, writer.epoch)
                documents.delete(bucket, writer)
            elif self.world.random.random() < 0.5:
                leases.release(bucket, writer)
        except (LeaseError, StoreUnavailableError):
            return

    def reader(self, actor: Actor) -> None:
        """Read over and over; each view is whole, and none goes back."""
        bucket: Any = Requests(self.world, actor)
        before: list[str] = []
        for _ in range(4):
            texts = texts_of(bucket, None)
            if not self.wiped:
                assert texts[: len(before)] == before, (before, texts)
            before = texts
            found = documents.documents(bucket, KEY, None)
            if not self.wiped:
                assert not found.damaged

    def check(self) -> None:
        """What was reported durable is there, once, in order; and the next holder can go on."""
        bucket: Any = Requests(self.world)
        for _ in range(20):
            holder = reader.read_head(bucket, KEY)
            try:
                writer = acquire(bucket, holder[0].epoch if holder else 0, "last").writer
                break
            except LeaseError:
                continue
        texts = texts_of(bucket, None)
        assert len(set(texts)) == len(texts), f"doubled: {texts}"
        assert set(texts) <= self.sent
        kept = [text for epoch, text in self.acked if epoch > self.wiped]
        lost = [text for text in kept if text not in texts]
        assert not lost, f"lost {lost} of {texts}"
        order = [tuple(map(int, text.split("."))) for text in texts]
        assert order == sorted(order), texts
        found = documents.documents(bucket, KEY, None)
        for document in found.found.values():
            folded = msgspec.json.decode(document.data)
            assert folded == texts[: len(folded)], (folded, texts)
        assert self._append(bucket, writer, writer.head + 1, ["999.0"])
        assert texts_of(bucket, None) == [*texts, "999.0"]


def texts_of(bucket: Any, upto: int | None) -> list[str]:
    """Read the log: its seqs have no gap."""
    parts = reader.stream(bucket, KEY, 0, None if upto is None else upto + 1)
    records = [record for part in parts for record in part]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    epochs = [record.epoch for record in records]
    assert epochs == sorted(epochs)
    return [msgspec.json.decode(r.payload) for r in records if r.kind == MESSAGE]


def play(seed: int, *, faults: float, deletes: bool) -> int:
    """Play one schedule, check what came of it, and return how much was acknowledged."""
    world = World(seed, faults=faults)
    story = Story(world)
    try:
        for number in range(4):
            world.start(f"P{number}", story.holder(appends=6, deletes=deletes))
        world.start("R", story.reader)
        world.run(kills=world.random.choice((0, 1, 2)))
        story.check()
        return len(story.acked)
    except (AssertionError, PerdureError, CorruptRecordError) as error:
        error.add_note(f"seed {seed}\n" + "\n".join(world.trace[-400:]))
        raise
    finally:
        for actor in world.actors:  # none is left waiting
            actor.killed = True
            actor.go.release()


def acquire(bucket: Any, after: int, owner: str) -> leases.Acquired:
    """Acquire the session after this epoch, whoever holds it, with all documents."""
    terms = Terms(me=owner, after=after, names=None)
    answer = leases.acquire(bucket, KEY, terms, owner)
    if isinstance(answer, Held):
        raise lease_held(KEY, after, 0 if answer.holder is None else answer.holder.epoch)
    return answer


def take(bucket: Any, after: int, owner: str) -> ObjectLogWriter:
    """Acquire the session after this epoch, and return its writer."""
    return acquire(bucket, after, owner).writer


def _check_what_was_read(bucket: Any, acquired: leases.Acquired) -> None:
    """What an acquire read is all there is, up to the epoch record."""
    plan, documents, writer = acquired.plan, acquired.documents, acquired.writer
    if plan is None or documents is None:
        return
    current = reader.read_head(bucket, KEY)
    again = reader.documents_of(bucket, plan.head, None)
    if current is not None and current[1] == plan.tag:  # else another one has it by now
        assert documents == again
    after = max(plan.after, documents.log_after or 0)
    records = reader.rest_of(bucket, plan, after, whole=True)
    if records is None:  # another one has it by now
        return
    assert [record.seq for record in records] == list(range(after + 1, writer.epoch_seq + 1))
    assert records[-1].epoch == writer.epoch
