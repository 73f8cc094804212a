"""What goes wrong on the way: answers lost, servers killed and stopped, holders stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from perdure.errors import StoreUnavailableError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Outcome, Status, Taken, take_after
from perdure.stores.s3 import S3Store
from perdure.testing.conformance._kit import manifest_of
from tests.servers import LONG, stop
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server, prefix_of, store_on
from tests.stores.s3.conftest import OpenS3
from tests.stores.s3.gateway import LOST, Gateway

KEY = SessionKey("agent")
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.anyio, pytest.mark.deep]


def entry(text: str) -> Entry:
    return Entry(MESSAGE, b'"%b"' % text.encode())


async def append(store: S3Store, grant: Taken, first: int, *texts: str) -> Outcome:
    batch = Batch(grant.key, grant.epoch, first, tuple(map(entry, texts)))
    (outcome,) = await store.append_many([batch])
    return outcome


async def texts_of(store: S3Store, key: SessionKey = KEY) -> list[str]:
    found = [r async for chunk in store.read_log(key) for r in chunk.records]
    assert [r.seq for r in found] == list(range(1, len(found) + 1))
    return [r.payload.decode().strip('"') for r in found if r.kind == MESSAGE]


async def test_an_append_whose_answer_is_lost_is_not_doubled(
    open_store: OpenS3, gateway: Gateway
) -> None:
    store = await open_store("one", endpoint=gateway.endpoint)
    grant = await take_after(store, KEY, after=0)
    gateway.fault = lambda method, path: LOST if method == "PUT" else None
    outcome = await append(store, grant, 2, "a", "b")
    assert outcome.status is Status.IN_DOUBT
    assert isinstance(outcome.error, StoreUnavailableError)
    gateway.fault = lambda method, path: None
    assert (await append(store, grant, 2, "a", "b")).status is Status.OK
    assert (await append(store, grant, 2, "a", "b", "c")).status is Status.OK
    assert await texts_of(store) == ["a", "b", "c"]


async def test_an_acquire_and_a_fold_whose_answers_are_lost_are_done(
    open_store: OpenS3, gateway: Gateway
) -> None:

    store = await open_store("one", endpoint=gateway.endpoint)
    gateway.fault = lambda m, path: LOST if m == "PUT" and path.endswith("/head") else None
    grant = await take_after(store, KEY, after=0)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    gateway.fault = lambda method, path: None
    assert (await store.read_documents(KEY)).found.keys() == documents.keys()
    holder = await store.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.owner) == (1, "one")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((503, "SlowDown"), Status.TRANSIENT),
        ((429, "TooManyRequests"), Status.TRANSIENT),
        ((403, "RequestTimeTooSkewed"), Status.TRANSIENT),
        ((403, "AccessDenied"), Status.TRANSIENT),
        ((500, "InternalError"), Status.IN_DOUBT),
        ((502, "BadGateway"), Status.IN_DOUBT),
    ],
)
async def test_what_a_refusal_means(
    open_store: OpenS3, gateway: Gateway, answer: tuple[int, str], status: Status
) -> None:
    store = await open_store("one", endpoint=gateway.endpoint)
    grant = await take_after(store, KEY, after=0)
    gateway.fault = lambda method, path: answer if method == "PUT" else None
    outcome = await append(store, grant, 2, "a")
    assert outcome.status is status
    assert isinstance(outcome.error, StoreUnavailableError)
    assert answer[1] in str(outcome.error)
    gateway.fault = lambda method, path: None
    assert (await append(store, grant, 2, "a")).status is Status.OK
    assert await texts_of(store) == ["a"]


async def test_two_writers_at_one_moment_of_whom_the_service_lets_none_win(
    open_store: OpenS3, gateway: Gateway
) -> None:
    """Amazon answers 409 then: nothing was written."""
    store = await open_store("one", endpoint=gateway.endpoint)
    grant = await take_after(store, KEY, after=0)
    gateway.fault = lambda m, path: (409, "ConditionalRequestConflict") if m == "PUT" else None
    assert (await append(store, grant, 2, "a")).status is not Status.OK
    gateway.fault = lambda method, path: None
    assert (await append(store, grant, 2, "a")).status is Status.OK


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.mark.deep
async def test_a_server_killed_under_load_loses_nothing_that_was_durable(
    own_server: S3Server, tmp_path: Path
) -> None:
    store = store_on(own_server, tmp_path)
    await store.open()
    keys = [SessionKey(f"agent-{n}") for n in range(6)]
    grants = [await take_after(store, key, after=0) for key in keys]
    durable: dict[SessionKey, list[str]] = {key: [] for key in keys}
    noticed, killed = anyio.Event(), anyio.Event()

    async def write(grant: Taken) -> None:
        for number in range(40):
            while True:
                first = len(durable[grant.key]) + 2
                outcome = await append(store, grant, first, f"{number}")
                if outcome.status is Status.OK:
                    durable[grant.key].append(f"{number}")
                    break
                assert outcome.status in (Status.TRANSIENT, Status.IN_DOUBT), outcome
                noticed.set()
                await killed.wait()
            await anyio.sleep(0)

    async def kill() -> None:
        while sum(map(len, durable.values())) < 60:
            await anyio.sleep(0)
        own_server.kill()
        await noticed.wait()
        own_server.start()  # in this thread: with the one that starts it, it ends
        killed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        for grant in grants:
            tasks.start_soon(write, grant)
    for key in keys:
        assert await texts_of(store, key) == [str(number) for number in range(40)]
    await store.aclose()


async def test_a_server_that_stands_still_leaves_doubt_and_then_goes_on(
    own_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_on(own_server, tmp_path)
    await store.open()
    grant = await take_after(store, KEY, after=0)
    own_server.freeze()
    with monkeypatch.context() as hasty:  # only now: a server may be slow and stand
        for client in ("_reads", "_writes"):
            hasty.setattr(store._open_bucket, client, own_server.client(timeout="1s"))
        outcome = await append(store, grant, 2, "a")
    assert outcome.status is Status.IN_DOUBT
    assert "no reply in time" in str(outcome.error)
    own_server.thaw()
    while (await append(store, grant, 2, "a")).status is not Status.OK:
        await anyio.sleep(0.01)
    assert await texts_of(store) == ["a"]
    own_server.kill()
    # The first may meet a connection that is only closing, and cannot know then.
    outcome = await append(store, grant, 3, "b")
    assert outcome.status in (Status.TRANSIENT, Status.IN_DOUBT)
    outcome = await append(store, grant, 3, "b")
    assert outcome.status is Status.TRANSIENT  # nobody listens: nothing can have been written
    with pytest.raises(StoreUnavailableError, match="nothing answers"):
        await store.head(KEY)
    await store.aclose()


HOLDER = """
import sys, anyio
from pathlib import Path
from typing import Any
from perdure.records.keys import SessionKey
from perdure.store import Batch, Status, take_after
from perdure.stores.s3 import S3Store
from perdure.testing.conformance._kit import manifest_of
from tests.stores.s3.test_faults import entry

async def main():
    store = S3Store.at(sys.argv[1])
    await store.open()
    key = SessionKey("agent")
    grant = await take_after(store, key, after=0)
    first = 2
    while True:
        (outcome,) = await store.append_many([Batch(key, 1, first, (entry(str(first)),))])
        print(outcome.status.value, first, flush=True)
        if outcome.status is not Status.OK:
            return
        first += 1

anyio.run(main)
"""


def holder_on(server: S3Server, place: Path) -> subprocess.Popen[str]:
    """Start a process that appends one commit after another, and says what became of each."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, server.url(prefix_of(place))],
        cwd=ROOT,
        env={**os.environ, **keys, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_a_holder_that_was_killed_leaves_all_that_it_called_durable(
    server: S3Server, open_store: OpenS3, tmp_path: Path
) -> None:
    with holder_on(server, tmp_path) as holder:
        assert holder.stdout is not None
        lines = [await anyio.to_thread.run_sync(holder.stdout.readline) for _ in range(30)]
        holder.kill()
        lines += (await anyio.to_thread.run_sync(holder.stdout.read)).splitlines()
    durable = [text for status, text in map(str.split, lines) if status == "ok"]
    store = await open_store("new")
    seen = await store.holder(KEY)
    assert seen is not None
    assert (seen.epoch, seen.released) == (1, False)
    grant = await take_after(store, KEY, after=1)
    texts = await texts_of(store)
    assert texts[: len(durable)] == durable
    assert len(texts) - len(durable) in (0, 1)  # one whose answer nobody heard
    assert (await append(store, grant, grant.head + 1, "on")).status is Status.OK


async def test_many_commits_are_merged_without_a_fold(
    open_store: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.stores.objects import documents as folding, reader, store as engine

    merged = threading.Event()

    def compact(*args: object) -> None:
        original(*args)  # type: ignore[arg-type]
        merged.set()

    original = folding.compact
    monkeypatch.setattr(folding, "compact", compact)
    monkeypatch.setattr(engine, "_COMPACT", 20)
    store = await open_store()
    grant = await take_after(store, KEY, after=0)
    for number in range(20):
        assert (await append(store, grant, number + 2, str(number))).status is Status.OK
    assert await anyio.to_thread.run_sync(merged.wait, LONG)
    found = await store._run(reader.plan, KEY)
    assert found is not None
    assert found.head.segments
    assert len(found.loose) < 15
    assert await texts_of(store) == [str(number) for number in range(20)]


async def test_a_wish_that_a_cancelled_heartbeat_collected_is_told_by_the_next(
    open_store: OpenS3,
) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take_after(store, KEY, after=0)
    holder = await other.holder(KEY)
    assert holder is not None
    for steps in (0, 1, 2, 5, 13):
        await other.request_handover(KEY, holder)
        asked: list[object] = []
        async with anyio.create_task_group() as tasks:

            async def beat(asked: list[object] = asked) -> None:
                asked += (await store.heartbeat()).handovers

            tasks.start_soon(beat)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        while not asked:
            asked += (await store.heartbeat()).handovers


async def test_a_slow_heartbeat_removes_no_request_that_it_has_not_read(
    open_store: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.stores.s3 import S3Bucket

    store, other = await open_store("one"), await open_store("other")
    await take_after(store, KEY, after=0)
    holder = await other.holder(KEY)
    assert holder is not None
    await other.request_handover(KEY, holder)
    read = S3Bucket.many
    asked: list[object] = []

    def read_late(bucket: S3Bucket, *args: Any) -> list[Any]:
        monkeypatch.setattr(S3Bucket, "many", read)
        asked.extend(anyio.from_thread.run(store.heartbeat).handovers)
        found = read(bucket, *args)
        anyio.from_thread.run(other.request_handover, KEY, holder)
        return found

    monkeypatch.setattr(S3Bucket, "many", read_late)
    asked += (await store.heartbeat()).handovers
    asked += (await store.heartbeat()).handovers
    assert asked == [KEY, KEY]


async def test_a_holder_that_was_stopped_writes_nothing_when_it_wakes_up(
    server: S3Server, open_store: OpenS3, tmp_path: Path
) -> None:

    with holder_on(server, tmp_path) as holder:
        try:
            await check_stopped(holder, await open_store("new"), manifest_of)
        finally:
            holder.kill()


async def check_stopped(holder: subprocess.Popen[str], store: S3Store, manifest_of: object) -> None:
    assert holder.stdout is not None
    lines = [await anyio.to_thread.run_sync(holder.stdout.readline) for _ in range(12)]
    stop(holder.pid)
    grant = await take_after(store, KEY, after=1)
    head = grant.head
    for number in range(12):
        assert (await append(store, grant, head + 1, f"new {number}")).status is Status.OK
        head += 1
    documents = {"session.json": b"{}"}
    manifest = manifest_of(grant, head, documents)  # type: ignore[operator]
    await store.write_documents(KEY, documents, manifest)  # merges the old holder's commits away
    holder.send_signal(signal.SIGCONT)
    rest = await anyio.to_thread.run_sync(holder.stdout.read)
    said = [line.split() for line in [*lines, *rest.splitlines()]]
    assert said[-1][0] == "conflict"
    durable = [text for status, text in said if status == "ok"]
    texts = await texts_of(store)
    olds = texts[: texts.index("new 0")]
    # A commit may have been made whose answer the stop cut off; it is told as a conflict then
    # only if it was not made.
    assert olds == durable, (olds, said[-2:])
    assert texts[len(olds) :] == [f"new {number}" for number in range(12)]


async def test_a_conflict_is_not_taken_for_a_write_that_was_done(
    open_store: OpenS3, gateway: Gateway
) -> None:
    """What is written whatever is there (segments, documents, blobs) has no condition to fail."""
    store = await open_store("one", endpoint=gateway.endpoint)
    gateway.fault = lambda m, path: (409, "OperationAborted") if m == "PUT" else None
    with pytest.raises(StoreUnavailableError, match="OperationAborted"):
        await store.put_blobs("", {name_of(b"kept"): b"kept"})
    gateway.fault = lambda method, path: None
    await store.put_blobs("", {name_of(b"kept"): b"kept"})
    assert await store.get_blob("", name_of(b"kept")) == b"kept"
