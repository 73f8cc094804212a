"""Readers: they hold no lease, wait for nobody, and see a prefix of whole groups."""
# ruff: noqa: D102

from __future__ import annotations

from contextlib import aclosing

import anyio
import msgspec

from perdure.records.records import EPOCH, Record
from perdure.store import Store
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)

_ROUNDS = 24
_GROUP = 3


class ReaderConformance(Suite):
    """What somebody sees who reads while others write, fold and take over."""

    async def test_a_reader_needs_no_lease(self, open_store: OpenStore) -> None:
        writer, reader = await open_store("writer"), await open_store("reader")
        grant = await take(writer)
        await append_ok(writer, grant, 2, *group("a"))
        assert tuple(entries(await read(reader))) == group("a")
        holder = await reader.holder(KEY)
        assert holder is not None
        assert holder.epoch == grant.epoch
        await append_ok(writer, grant, 3, *group("b"))
        assert tuple(entries(await read(reader))) == group("a") + group("b")

    async def test_a_reader_that_leaves_early_leaves_nothing_open(self, store: Store) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *[entry for n in range(500) for entry in group(str(n))])
        async with aclosing(store.read_log(KEY)) as chunks:
            first = await anext(chunks)
        assert first.records[0].kind == EPOCH
        assert await store.head(KEY) == 501

    async def test_readers_beside_a_folding_writer_see_whole_prefixes(
        self, open_store: OpenStore
    ) -> None:
        readers = [await open_store("reader-1"), await open_store("reader-2")]
        writers = [await open_store("writer-1"), await open_store("writer-2")]
        done = anyio.Event()

        async def watch(reader: Store) -> None:
            versions = 0
            while not done.is_set():
                found = await reader.read_documents(KEY)
                head = await reader.head(KEY)
                records = await read_settled(reader)
                versions = check_view(records, versions)
                assert len(records) >= head
                assert not found.damaged
                for document in found.found.values():
                    folded = msgspec.json.decode(document.data)
                    assert folded == texts_of(records[: document.as_of_seq])

        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(watch, reader)
            for writer in writers:
                await write_and_fold(writer)
            done.set()
        assert len(texts_of(await read(readers[0]))) == 2 * _ROUNDS * _GROUP


async def write_and_fold(writer: Store) -> None:
    """Take the session over, then append groups and fold after every fourth."""
    grant = await take(writer)
    head = grant.head
    for round_ in range(_ROUNDS):
        texts = [f"{grant.epoch}.{round_}.{place}" for place in range(_GROUP)]
        head = await append_ok(writer, grant, head + 1, *group(*texts))
        if round_ % 4 == 0:
            folded = texts_of(await read(writer))
            documents = {"session.json": msgspec.json.encode(folded)}
            await writer.write_documents(KEY, documents, manifest_of(grant, head, documents))


async def read_settled(reader: Store) -> list[Record]:
    """Read until no takeover is under way; a store says so instead of lying."""
    while True:
        records: list[Record] = []
        settled = True
        async for chunk in reader.read_log(KEY):
            settled = settled and chunk.settled
            records.extend(chunk.records)
        if settled:
            return records


def texts_of(records: list[Record]) -> list[str]:
    """Return the texts that the writers appended."""
    return [
        msgspec.json.decode(record.payload)["text"] for record in records if record.kind != EPOCH
    ]


def check_view(records: list[Record], seen: int) -> int:
    """Check one reader's view: no gap, whole groups, nothing gone that was seen before."""
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= seen
    if records:
        assert records[-1].end
    texts = texts_of(records)
    assert len(texts) % _GROUP == 0
    wanted = [
        f"{epoch}.{round_}.{place}"
        for epoch in (1, 2)
        for round_ in range(_ROUNDS)
        for place in range(_GROUP)
    ]
    assert texts == wanted[: len(texts)]
    return len(records)
