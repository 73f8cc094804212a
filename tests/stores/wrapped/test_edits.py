"""What somebody does to an encrypted session without the key is found, by all who read it.

The inner store is written anew through its own port, with each of the edits that its owner
could make: what it accepts is whole, and only the key tells that it is not what was written.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Message, Shutdown, connect
from perdure.cli.check import audit
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import EPOCH, Entry, Record
from perdure.session.stored import SessionStore
from perdure.store import (
    Document,
    Documents,
    Held,
    LogChunk,
    RestoreData,
    Status,
    Store,
    Taken,
    Terms,
    take_after,
)
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.wrapped import EncryptedStore, encrypted
from perdure.testing.conformance._kit import append, append_ok, group, manifest_of, take
from tests.crash import places
from tests.golden.reader import HERE
from tests.servers import postgres, valkey
from tests.servers.s3 import prefix_of, shared, store_on

# A bucket is used from this process: the one of `places` is for children that are forked.
KINDS: dict[str, places.Make] = {
    **places.KINDS,
    "s3": lambda root, owner: store_on(shared(), root, owner=owner),
}
KEY = "5a" * 32
ADA, BOB = SessionKey("ada"), SessionKey("bob")
NO_SIGNALS = Shutdown(signals=False)

Edit = Callable[[list[Record]], list[Record]]


class Edited:
    """An inner store whose answers somebody has changed, as he could have on its disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.log: dict[SessionKey, list[Record]] = {}
        self.documents: dict[SessionKey, Documents] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """The epoch record comes behind what was left of the log, and is read with the rest."""
        lease = await self._store.acquire(key, terms)
        if isinstance(lease, Held) or not (key in self.log or key in self.documents):
            return lease
        if key in self.log:
            (record,) = (await log_of(self._store, key))[-1:]
            last = self.log[key][-1].seq
            self.log[key] = [*self.log[key], changed(record, seq=last + 1)]
            lease = msgspec.structs.replace(lease, head=last + 1)
        have = await self.read_documents(key, terms.names)
        after = have.log_after
        tail = None if after is None else tuple(await log_of(self, key, after=after))
        return msgspec.structs.replace(lease, found=RestoreData(have, after or 0, tail))

    async def head(self, key: SessionKey) -> int:
        if key not in self.log:
            return await self._store.head(key)
        return self.log[key][-1].seq

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        if key not in self.log:
            log = self._store.read_log(
                key, after=after, before=before, limit=limit, reverse=reverse
            )
            async with aclosing(log):
                async for chunk in log:
                    yield chunk
            return
        end = before or 2**60
        records = [one for one in self.log[key] if after < one.seq < end]
        records = (records[::-1] if reverse else records)[:limit]
        for first in range(0, len(records), 3):
            yield LogChunk(tuple(records[first : first + 3]))

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        if key not in self.documents:
            return await self._store.read_documents(key, names)
        have = self.documents[key]
        wanted = [name for name in have.found if names is None or name in names]
        return msgspec.structs.replace(have, found={name: have.found[name] for name in wanted})


def changed(record: Record, **fields: object) -> Record:
    return msgspec.structs.replace(record, **fields)


def changed_manifest(manifest: Manifest, **fields: object) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def epoch(record: Record, number: int) -> Record:
    return changed(record, kind=EPOCH, epoch=number, payload=b'{"owner":"x","at":1.0}')


def at(number: int, edit: Callable[[list[Record], int], Record]) -> Edit:
    def work(log: list[Record]) -> list[Record]:
        place = number - 1
        return [*log[:place], edit(log, place), *log[place + 1 :]]

    return work


def dropped(log: list[Record]) -> list[Record]:
    return [*log[:5], *(changed(one, seq=one.seq - 1) for one in log[6:])]


def repeated(log: list[Record]) -> list[Record]:
    return [*log[:6], *(changed(one, seq=one.seq + 1) for one in log[5:])]


def exchanged(log: list[Record]) -> list[Record]:
    one, other = log[4], log[5]
    return [
        *log[:4],
        changed(one, payload=other.payload),
        changed(other, payload=one.payload),
        *log[6:],
    ]


EDITS: dict[str, Edit] = {
    "replaced": at(6, lambda log, n: changed(log[n], payload=log[n + 1].payload)),
    "flipped": at(6, lambda log, n: changed(log[n], payload=b'"AAAA' + log[n].payload[5:])),
    "dropped": dropped,
    "left out": lambda log: [*log[:5], *log[6:]],
    "repeated": repeated,
    "exchanged": exchanged,
    "another kind": at(6, lambda log, n: changed(log[n], kind="x:y")),
    "another end": at(6, lambda log, n: changed(log[n], end=not log[n].end)),
    "another epoch": at(6, lambda log, n: changed(log[n], epoch=7)),
    "an epoch record of this epoch": at(6, lambda log, n: epoch(log[n], 1)),
    "an epoch record of a new epoch": at(6, lambda log, n: epoch(log[n], 2)),
    "the real epoch record": at(1, lambda log, n: changed(log[n], payload=b'{"owner":"y"}')),
    "a turn of epoch records": lambda log: [
        *log[:5],
        *(epoch(one, 2 + n) for n, one in enumerate(log[5:8])),
        *log[8:],
    ],
    "head cut": lambda log: log[4:],
    "head cut, a new epoch record": lambda log: [epoch(log[4], 1), *log[5:]],
}


OTHERS = ("sqlite", "postgres", "redis", "s3")


@pytest.fixture(params=["file", *(pytest.param(name, marks=pytest.mark.deep) for name in OTHERS)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


EDITED = [
    *(("file", edit) for edit in EDITS),
    *(pytest.param(name, "replaced", marks=pytest.mark.deep) for name in OTHERS),
]
"""Each edit, of a log that was written to files; of the other stores one: it is made above them."""


async def talk(store: Store, agent: str, turns: int, *, since: int = 0) -> None:
    async with connect(store, shutdown=NO_SIGNALS, autosave=None) as sessions:
        async with sessions.open(agent) as session:
            for turn in range(since, since + turns):
                async with session.turn():
                    session.append(Message.user(f"asks {turn}"))
                    session.append(Message.assistant("ok"))


async def log_of(store: Any, key: SessionKey, *, after: int = 0) -> list[Record]:
    return [one async for chunk in store.read_log(key, after=after) for one in chunk.records]


async def told(inner: Edited) -> dict[str, str]:
    """Return what each way of reading says of a session: empty where it notices nothing."""
    said: dict[str, str] = {}
    async with connect(EncryptedStore(inner, KEY), shutdown=NO_SIGNALS, read_only=True) as sessions:
        try:
            view = await sessions.load("ada")
            assert view is not None
            said["load"] = " ".join(view.restore_report.damaged)
        except CorruptRecordError as error:
            said["load"] = str(error)
        try:
            said["history"] = ""
            view = await sessions.load("ada")
            assert view is not None
            await view.history(limit=1000)
        except CorruptRecordError as error:
            said["history"] = str(error)
    store = EncryptedStore(inner, KEY)
    await store.open()
    said["check"] = " ".join(str(one) for one in (await audit(SessionStore(store), ADA)).problems)
    for name, options in (("forward", {}), ("reverse", {"reverse": True})):
        try:
            async for _ in store.read_log(ADA, **options):
                pass
            said[name] = ""
        except CorruptRecordError as error:
            said[name] = str(error)
    await store.aclose()
    return said


@pytest.mark.parametrize(("kind", "edit"), EDITED, indirect=["kind"])
async def test_an_edited_log_is_found_by_all_who_read_it(
    kind: str, edit: str, tmp_path: Path
) -> None:
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    await talk(EncryptedStore(inner, KEY), "ada", 3)
    await inner.open()
    log = await log_of(inner._store, ADA)
    have = await inner._store.read_documents(ADA)
    await inner.aclose()
    assert not any((await told(inner)).values())
    inner.log[ADA] = EDITS[edit](log)
    said = await told(inner)
    for who in ("history", "check", "forward", "reverse"):
        assert said[who], who
    assert have.manifest is not None
    inner.documents[ADA] = forged(have.manifest, have.found)  # all of the log has to be read
    with pytest.raises(CorruptRecordError):
        async with connect(EncryptedStore(inner, KEY), shutdown=NO_SIGNALS) as sessions:
            await sessions.open("ada")


@pytest.mark.parametrize(("kind", "edit"), EDITED, indirect=["kind"])
async def test_opening_finds_an_edit_behind_the_last_fold(
    kind: str, edit: str, tmp_path: Path
) -> None:
    """The part of the log that it reads; what lies before that part, other readers find."""
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    await talk(EncryptedStore(inner, KEY), "ada", 3)
    async with (
        connect(EncryptedStore(inner, KEY), shutdown=NO_SIGNALS, autosave=None) as sessions,
        sessions.open("ada") as session,
    ):
        for turn in range(3):
            async with session.turn():
                session.append(Message.user(f"asks {turn} again"))
        await session.save()  # as a kill leaves it: saved, and not folded
        log = await log_of(inner._store, ADA)
        have = await inner._store.read_documents(ADA)
    assert have.manifest is not None
    inner.documents[ADA] = have
    folded, tail = log[: have.manifest.as_of_seq], log[have.manifest.as_of_seq :]

    async def opened() -> list[str]:
        async with (
            connect(EncryptedStore(inner, KEY), shutdown=NO_SIGNALS, autosave=None) as sessions,
            sessions.open("ada") as session,
        ):
            assert session.restore_report.source == "catch_up"
            return [message.text for message in session.context() if message.role == "user"]

    whole = [f"asks {turn}" for turn in range(3)] + [f"asks {turn} again" for turn in range(3)]
    inner.log[ADA] = log
    assert await opened() == whole
    before = EDITS[edit](folded)
    moved = before[-1].seq - folded[-1].seq
    inner.log[ADA] = [*before, *(changed(one, seq=one.seq + moved) for one in tail)]
    said = await told(inner)
    assert said["history"]
    assert said["check"]
    inner.log[ADA] = [*folded, *EDITS[edit](tail)]
    with pytest.raises(CorruptRecordError):
        await opened()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # reading is on trio above
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    "after", [4, 5, *(pytest.param(seq, marks=pytest.mark.deep) for seq in (6, 7, 8))]
)
async def test_no_slice_of_an_edited_log_hides_the_edit(
    edit: str, after: int, tmp_path: Path
) -> None:
    """A slice with the edit in it, read in both directions, is never given out as whole."""
    inner = Edited(KINDS["file"](tmp_path / "kept", None))
    store = EncryptedStore(inner, KEY)
    await talk(store, "ada", 3)
    await store.open()
    whole = await log_of(store, ADA)
    log = await log_of(inner._store, ADA)
    inner.log[ADA] = EDITS[edit](log)
    for reverse in (False, True):
        for before in range(after + 2, len(log) + 1):
            seen: list[Record] = []
            try:
                async for chunk in store.read_log(ADA, after=after, before=before, reverse=reverse):
                    seen += chunk.records
            except CorruptRecordError:
                continue
            want = [one for one in whole if after < one.seq < before]
            assert seen == (want[::-1] if reverse else want), (reverse, before)
    await store.aclose()


async def test_a_holder_that_finds_its_log_edited_appends_nothing_and_says_so() -> None:
    """It is damage, and not the loss of its lease: no other process has the session."""
    inner = Edited(MemoryStore())
    before, store = EncryptedStore(inner, KEY), EncryptedStore(inner, KEY)
    first = await take(before, ADA)
    await append_ok(before, first, first.head + 1, *group("one", "two"))
    grant = await take(store, ADA)
    log = await log_of(inner, ADA)
    inner.log[ADA] = at(3, lambda log, n: changed(log[n], payload=log[n - 1].payload))(log)
    outcome = await append(store, grant, grant.head + 1, *group("three"))
    assert outcome.status is Status.PERMANENT
    assert isinstance(outcome.error, CorruptRecordError)
    assert await log_of(inner._store, ADA) == log


async def test_every_slice_of_a_log_with_many_holders_and_a_fold_within_it_is_read(
    tmp_path: Path,
) -> None:
    """Holders that wrote nothing leave runs of epoch records, which have no link of their own."""
    inner = Edited(KINDS["file"](tmp_path / "kept", None))
    store = EncryptedStore(inner, KEY)
    await talk(store, "ada", 2)  # folded
    await store.open()
    for holders in (4, 4, 2):
        for _ in range(holders):
            lease = await take(store, ADA)
        if holders > 2:
            await append_ok(store, lease, lease.head + 1, *group("not folded"))
    whole, log = await log_of(store, ADA), await log_of(inner._store, ADA)
    inner.log[ADA] = log
    assert [one.seq for one in whole] == list(range(1, len(log) + 1))
    for after in range(len(log)):
        for before in range(after + 2, len(log) + 2):
            want = whole[after : before - 1]
            for reverse in (False, True):
                part = store.read_log(ADA, after=after, before=before, reverse=reverse)
                seen = [one async for chunk in part for one in chunk.records]
                assert seen == (want[::-1] if reverse else want), (after, before, reverse)
    await store.aclose()


async def test_a_lost_key_is_written_again_however_many_sessions_were_used_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted, "_MAX_CACHED_SESSIONS", 1)
    inner = Edited(FileStore(tmp_path / "kept"))
    store = EncryptedStore(inner, KEY)
    await store.open()
    lease = await take(store, ADA)
    head = await append_ok(store, lease, lease.head + 1, *group("a", "b"))
    for number in range(3):
        other = await take(store, SessionKey(f"other-{number}"))
        await append_ok(store, other, other.head + 1, *group("c"))
    inner.documents[ADA] = Documents()
    await store.write_documents(ADA, {}, manifest_of(lease, head, {}))
    del inner.documents[ADA]
    written = await log_of(store, ADA)
    await store.aclose()
    again = EncryptedStore(FileStore(tmp_path / "kept"), KEY)
    await again.open()
    assert await log_of(again, ADA) == written
    await again.aclose()


async def test_a_record_of_another_session_is_found(kind: str, tmp_path: Path) -> None:
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    for agent in ("ada", "bob"):
        await talk(EncryptedStore(inner, KEY), agent, 2)
    await inner.open()
    mine, theirs = await log_of(inner._store, ADA), await log_of(inner._store, BOB)
    await inner.aclose()
    inner.log[ADA] = [*mine[:5], theirs[5], *mine[6:]]
    said = await told(inner)
    assert all(said[who] for who in ("history", "check", "forward", "reverse"))


@pytest.mark.parametrize("filled", [False, True], ids=["cut", "cut and filled"])
async def test_a_tail_cut_below_the_manifest_is_found(
    kind: str, filled: bool, tmp_path: Path
) -> None:
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    await talk(EncryptedStore(inner, KEY), "ada", 3)
    await inner.open()
    log = await log_of(inner._store, ADA)
    await inner.aclose()
    cut = [epoch(one, 5 + n) for n, one in enumerate(log[-3:])] if filled else []
    inner.log[ADA] = [*log[:-3], *cut]
    said = await told(inner)
    assert said["check"]
    assert said["forward"]
    if filled:
        assert said["history"]
        assert said["reverse"]
        store = EncryptedStore(inner, KEY)
        await store.open()
        last = len(log) - 3  # that is true
        slices = itertools.product((False, True), range(last - 1, last + 3), (None, 1, 2, 3))
        for reverse, after, limit in slices:
            seen: list[int] = []
            try:
                async for chunk in store.read_log(ADA, after=after, limit=limit, reverse=reverse):
                    seen += [one.seq for one in chunk.records]
            except CorruptRecordError:
                continue
            assert max(seen) <= last, (reverse, after, limit)
        await store.aclose()
    else:
        assert said["load"]


async def test_a_fold_s_part_of_an_older_copy_is_found(kind: str, tmp_path: Path) -> None:
    """Manifest and documents of an older fold, beside records that knew of a newer one."""
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    await talk(EncryptedStore(inner, KEY), "ada", 2)
    await inner.open()
    old = await inner._store.read_documents(ADA)
    await inner.aclose()
    for since in (2, 4):
        await talk(EncryptedStore(inner, KEY), "ada", 2, since=since)
    inner.documents[ADA] = old
    said = await told(inner)
    for who in ("load", "check", "forward", "reverse"):
        assert "as of" in said[who], (who, said[who])
    inner.documents.clear()
    await inner.open()
    new = await inner._store.read_documents(ADA)
    await inner.aclose()
    name = "session.json"
    assert new.manifest is not None
    listed = {**new.manifest.documents, name: (old.manifest or new.manifest).documents[name]}
    mixed = msgspec.structs.replace(new.manifest, documents=listed)
    inner.documents[ADA] = Documents(mixed, {**new.found, name: old.found[name]})
    said = await told(inner)  # an older document, beside the newer rest
    assert name in said["load"]
    assert name in said["check"]


def forged(manifest: Manifest, found: Mapping[str, Document]) -> Documents:
    """Return what a session looks like that was never folded: the key is all that is listed."""
    keys = {name: one for name, one in manifest.documents.items() if name.startswith("keys/")}
    bare = Manifest(key=manifest.key, epoch=manifest.epoch, as_of_seq=1, documents=keys)
    return Documents(bare, {name: found[name] for name in keys})


async def test_a_manifest_that_was_changed_or_removed_is_told(kind: str, tmp_path: Path) -> None:
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    for agent in ("ada", "bob"):
        await talk(EncryptedStore(inner, KEY), agent, 2)
    await inner.open()
    mine = await inner._store.read_documents(ADA)
    theirs = await inner._store.read_documents(BOB)
    await inner.aclose()
    assert mine.manifest is not None
    assert theirs.manifest is not None
    keys = {name: one.data for name, one in mine.found.items() if name.startswith("keys/")}
    moved = msgspec.structs.replace(mine.manifest, about=theirs.manifest.about)
    for what, have in {
        "forged": forged(mine.manifest, mine.found),
        "of another session": msgspec.structs.replace(mine, manifest=moved),
        "another seq": msgspec.structs.replace(
            mine, manifest=msgspec.structs.replace(mine.manifest, as_of_seq=3)
        ),
        "other counters": msgspec.structs.replace(
            mine, manifest=msgspec.structs.replace(mine.manifest, counters={"turns": 9})
        ),
        "removed": Documents(damaged=tuple(mine.found), remains=keys),
    }.items():
        inner.documents[ADA] = have
        said = await told(inner)
        assert said["load"], what
        assert said["check"], what


async def incomplete(store: Store) -> list[str]:
    """Return what `perdure check` says of ada's log."""
    await store.open()
    seen = await audit(SessionStore(store), ADA)
    await store.aclose()
    return [one.detail for one in seen.problems if one.what == "log"]


async def test_a_forged_manifest_is_told_past_the_folds_until_the_log_is_accepted(
    kind: str, tmp_path: Path
) -> None:
    """A tail cut off with it leaves no trace: the fold of what is left may not hide that."""
    place = tmp_path / "kept"
    await talk(EncryptedStore(KINDS[kind](place, None), KEY), "ada", 3)
    assert await incomplete(EncryptedStore(KINDS[kind](place, None), KEY)) == []
    inner = KINDS[kind](place, None)
    await inner.open()
    have = await inner.read_documents(ADA)
    holder = await inner.holder(ADA)
    assert have.manifest is not None
    assert holder is not None
    grant = await take_after(inner, ADA, after=holder.epoch)
    bare = forged(have.manifest, have.found).manifest
    assert bare is not None
    await inner.write_documents(ADA, {}, changed_manifest(bare, epoch=grant.epoch))
    await inner.release(ADA, grant.epoch)
    await inner.aclose()
    (before,) = await incomplete(EncryptedStore(KINDS[kind](place, None), KEY))
    assert "was not written with the key" in before
    for since in (3, 4):
        await talk(EncryptedStore(KINDS[kind](place, None), KEY), "ada", 1, since=since)
        (after,) = await incomplete(EncryptedStore(KINDS[kind](place, None), KEY))
        assert f"when the log ended at record {grant.head}," in after
    store = EncryptedStore(KINDS[kind](place, None), KEY)
    await store.open()
    assert await store.accept_log(ADA)
    assert not await store.accept_log(ADA)
    await store.aclose()
    await talk(EncryptedStore(KINDS[kind](place, None), KEY), "ada", 1, since=5)
    assert await incomplete(EncryptedStore(KINDS[kind](place, None), KEY)) == []


async def lose_manifest(kind: str, root: Path) -> None:
    """Remove ada's manifest from where the inner store keeps it."""
    if kind == "file":
        for one in (root / "agents" / "ada").glob("manifest-*.json"):
            one.unlink()
    elif kind == "sqlite":
        with closing(sqlite3.connect(root / "store.db")) as database, database:
            whose = "(SELECT id FROM session WHERE agent = 'ada')"
            database.execute(f"DELETE FROM manifest WHERE session = {whose}")
    elif kind == "postgres":
        schema = f'"{postgres.schema_of(root)}"'
        whose = f"(SELECT id FROM {schema}.sessions WHERE agent = 'ada')"
        postgres.shared(fsync=True).run(f"DELETE FROM {schema}.manifests WHERE session = {whose}")
    elif kind == "redis":
        from perdure.stores.redis.layout import KeyNames

        place = KeyNames(root.parent.name).session_keys(ADA).session
        assert valkey.shared().say("HDEL", place, "m") == b":1"
    else:
        import obstore

        from perdure.stores.objects import layout

        bucket = shared().client(prefix_of(root))
        name = f"{layout.folder_of(ADA)}/head"
        there = layout.decode(name, bytes(obstore.get(bucket, name).bytes()), ADA)
        lost = msgspec.structs.replace(there, manifest=msgspec.Raw(b"null"))
        obstore.put(bucket, name, layout.with_checksum(lost))


async def test_a_manifest_that_is_gone_is_told_and_costs_nothing(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    for agent in ("ada", "bob"):
        await talk(EncryptedStore(KINDS[kind](place, None), KEY), agent, 2)
    await lose_manifest(kind, place)
    (before,) = await incomplete(EncryptedStore(KINDS[kind](place, None), KEY))
    assert "the session had one" in before
    store = EncryptedStore(KINDS[kind](place, None), KEY)
    async with connect(store, shutdown=NO_SIGNALS, autosave=None) as sessions:
        async with sessions.open("ada") as ada:
            assert "session.json" in ada.restore_report.damaged
            assert [one.text for one in ada.context()] == ["asks 0", "ok", "asks 1", "ok"]
        async with sessions.open("bob") as bob:
            assert bob.restore_report.damaged == ()
    (after,) = await incomplete(EncryptedStore(KINDS[kind](place, None), KEY))
    assert "may be incomplete" in after


async def test_an_unlinked_log_is_refused_where_the_chain_is_to_be(
    kind: str, tmp_path: Path
) -> None:
    """Nobody strips the chain: records of the format before it fit nowhere any more."""
    store = EncryptedStore(KINDS[kind](tmp_path / "kept", None), KEY)
    await talk(store, "ada", 1)
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    await store.open()
    plain = await log_of(store, ADA)
    entries = [Entry(one.kind, one.payload, one.end) for one in plain[1:]]
    unlinked = store.transform_spill(ADA, 1, 1, entries)
    assert unlinked is not None
    await store.aclose()
    inner.log[ADA] = [plain[0], *(Record(n, 1, *one) for n, one in enumerate(unlinked, 2))]
    said = await told(inner)
    assert all(said[who] for who in ("history", "check", "forward", "reverse"))


async def test_a_pruned_log_is_whole_and_cut_further_it_is_not(kind: str, tmp_path: Path) -> None:
    inner = Edited(KINDS[kind](tmp_path / "kept", None))
    store = EncryptedStore(inner, KEY)
    await talk(store, "ada", 3)
    await store.open()
    holder = await store.holder(ADA)
    assert holder is not None
    grant = await take_after(store, ADA, after=holder.epoch)
    await store.trim(ADA, grant.epoch, 6)
    await store.release(ADA, grant.epoch)
    assert (await log_of(store, ADA))[-1].seq == grant.head
    raw = await log_of(inner._store, ADA)
    for allowed, first in ((True, 5), (True, 6), (False, 7)):
        inner.log[ADA] = [one for one in raw if one.seq >= first]
        if allowed:
            assert (await log_of(store, ADA))[-1].seq == grant.head
        else:
            with pytest.raises(CorruptRecordError, match="before it are missing"):
                await log_of(store, ADA)
    await store.aclose()


async def test_a_trim_beyond_the_end_lets_nothing_later_go(tmp_path: Path) -> None:
    inner = Edited(KINDS["file"](tmp_path / "kept", None))
    store = EncryptedStore(inner, KEY)
    await talk(store, "ada", 2)
    await store.open()
    holder = await store.holder(ADA)
    assert holder is not None
    grant = await take_after(store, ADA, after=holder.epoch)
    await store.trim(ADA, grant.epoch, grant.head + 100)
    await append_ok(store, grant, grant.head + 1, *group("one"), *group("two"))
    raw = await log_of(inner._store, ADA)
    inner.log[ADA] = [one for one in raw if one.seq > grant.head]
    assert len(await log_of(store, ADA)) == 2
    del inner.log[ADA][0]
    with pytest.raises(CorruptRecordError, match="before it are missing"):
        await log_of(store, ADA)
    await store.aclose()


GOLDEN = HERE / "encrypted"


async def test_a_session_of_before_the_chain_is_read_and_linked_from_then_on(
    tmp_path: Path,
) -> None:
    shutil.copytree(GOLDEN / "store", tmp_path / "kept")
    key = (GOLDEN / "key").read_text("ascii")
    before = ["open 0 asks 0", "ok", "open 0 asks 1", "ok"]
    before += ["open 1 asks 0", "ok", "open 1 asks 1", "ok"]
    inner = Edited(KINDS["file"](tmp_path / "kept", None))
    store = EncryptedStore(inner, key)
    async with connect(store, shutdown=NO_SIGNALS, read_only=True) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert [one.text for one in view.context()] == before
    async with connect(store, shutdown=NO_SIGNALS) as sessions:
        async with sessions.open("ada") as session:
            assert session.restore_report.damaged == ()
            assert await session.state.get("notes") == {"n": 1}
            async with session.turn():
                session.append(Message.user("goes on"))
    await store.open()
    assert (await audit(SessionStore(store), ADA)).problems == []
    log = await log_of(inner._store, ADA)
    begins = next(one.seq for one in log if one.epoch == 3)
    for edit in (
        [*log[:begins], epoch(log[begins], 3), *log[begins + 1 :]],
        [*log[: begins - 1], *log[begins:]],
    ):
        inner.log[ADA] = edit
        with pytest.raises(CorruptRecordError):
            await log_of(store, ADA)
    await store.aclose()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PERDURE_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def edited_on_disk(folder: Path, how: str) -> str:
    made = run(str(Path(__file__).with_name("edit_file.py")), str(folder), how)
    assert made.returncode == 0, made.stderr
    return f"encrypted+file:{folder}"


def test_the_command_line_tells_too(tmp_path: Path) -> None:
    """The attack as it is made on files: one line replaced, and every checksum made anew."""
    url = edited_on_disk(tmp_path / "kept", "replace")
    for command in (["check"], ["show", "ada"]):
        done = run("-m", "perdure.cli", *command, "--store", url)
        assert done.returncode != 0, (command, done.stdout)
        assert "epoch" in done.stdout + done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the command line's own
async def test_the_command_line_goes_on_telling_of_a_cut_tail_until_it_is_repaired(
    tmp_path: Path,
) -> None:
    """The last turns cut off, and the manifest forged to match: then the session is used."""
    url = edited_on_disk(tmp_path / "kept", "cut")
    await talk(EncryptedStore(FileStore(tmp_path / "kept"), KEY), "ada", 1)
    told = "may be incomplete: its manifest was lost or forged when the log ended at record 7,"

    def says(*command: str, code: int = 0) -> bool:
        done = run("-m", "perdure.cli", *command, "--store", url)
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return told in " ".join((done.stdout + done.stderr).split())

    new = (str(tmp_path / f"{n}") for n in itertools.count())
    reading = (
        *(["show", "ada"], ["export", "ada"], ["show", "ada", "--restore-plan"]),
        *(["export", "ada", "--layout", layout, "--out"] for layout in ("files", "bundle")),
        ["export", "ada", "--salvage", "--out"],
    )
    for command in reading:
        assert says(*command, *([next(new)] if "--out" in command else [])), command
    assert says("check", code=1)
    assert says("check", "--repair")
    assert not says("check")
    for command in reading[:2]:
        assert not says(*command), command
