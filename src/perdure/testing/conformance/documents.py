"""Documents and the directory: folded views with a hash each, and every session under its name.

The manifest is replaced last. Names may have any characters; a deleted session is gone.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from perdure.errors import CorruptRecordError, PerdureError, UnsupportedVersionError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, About
from perdure.store import (
    Batch,
    Beginning,
    BlobSweep,
    Document,
    Documents,
    SessionQuery,
    Status,
    Store,
    SupportsReadMany,
    Taken,
    Terms,
    listed_blobs,
    shortcut,
)
from perdure.testing.conformance._kit import (
    KEY,
    SESSION,
    OpenStore,
    SessionWriter,
    Suite,
    appended,
    folded,
    group,
    held,
    hold,
    lost,
    manifest_of,
    read,
    take,
    together,
)

# ruff: noqa: D102


_NAMES = (
    "session.json",
    "memory.json",
    "plugins/weather.json",
    "state/A.json",
    "state/a.json",
    "state/...json",
    "state/CON.json",
    "state/Ünï cødé 😀.json",
    "state/" + "long" * 100 + ".json",
)


class DocumentConformance(Suite):
    """A document is found with the hash and the as_of of its manifest, or called damaged."""

    async def test_a_session_without_a_fold_has_no_documents(self, store: Store) -> None:
        assert await store.read_documents(KEY) == Documents()
        await take(store)
        assert await store.read_documents(KEY) == Documents()

    async def test_documents_come_back_with_their_manifest(self, store: Store) -> None:
        writer = await hold(store, "a", "b")
        documents = {name: f"content of {name}".encode() for name in _NAMES}
        manifest = await writer.fold(documents, counters={"turns": 3, "messages": 2})
        got = await store.read_documents(KEY)
        assert got.found == {name: Document(data, 3) for name, data in documents.items()}
        assert got.damaged == ()
        assert got.manifest is not None
        # The position is the store's own.
        assert msgspec.structs.replace(got.manifest, position=manifest.position) == manifest

    async def test_documents_outlive_their_store(self, store: Store, open_store: OpenStore) -> None:
        await (await hold(store)).fold(SESSION)
        await store.aclose()
        assert await folded(await open_store("two")) == {"session.json": Document(b"{}", 1)}

    async def test_only_the_named_documents_are_read(self, store: Store) -> None:
        writer = await hold(store)
        await writer.fold({"session.json": b"1", "memory.json": b"2", "plugins/x.json": b""})
        got = await store.read_documents(KEY, ["plugins/x.json", "nothing.json"])
        assert got.found == {"plugins/x.json": Document(b"", 1)}
        assert got.damaged == ()
        assert got.manifest is not None
        assert await folded(store, names=[]) == {}

    async def test_each_document_keeps_its_own_as_of(self, store: Store) -> None:
        writer = await hold(store)
        old = await writer.fold({"session.json": b"old", "memory.json": b"old"})
        await writer.add("a")
        document = {"session.json": b"new"}
        new = manifest_of(writer.grant, writer.head, document)
        new.documents["memory.json"] = old.documents["memory.json"]
        await store.write_documents(KEY, document, new)
        assert await folded(store) == {
            "session.json": Document(b"new", 2),
            "memory.json": Document(b"old", 1),
        }

    async def test_a_document_that_is_no_longer_listed_is_gone(self, store: Store) -> None:
        writer = await hold(store)
        await writer.fold({"session.json": b"a", "memory.json": b"b"})
        await store.write_documents(KEY, {}, manifest_of(writer.grant, 1, {"session.json": b"a"}))
        assert await folded(store) == {"session.json": Document(b"a", 1)}

    @pytest.mark.parametrize("written", [{"memory.json": b"wrong"}, {}], ids=["other", "not there"])
    async def test_what_does_not_match_its_hash_is_damaged(
        self, store: Store, written: dict[str, bytes]
    ) -> None:
        grant = await take(store)
        manifest = manifest_of(grant, 1, {"session.json": b"right", "memory.json": b"right"})
        await store.write_documents(KEY, {"session.json": b"right", **written}, manifest)
        got = await store.read_documents(KEY)
        assert got.found == {"session.json": Document(b"right", 1)}
        assert got.damaged == ("memory.json",)

    async def test_an_old_epoch_folds_nothing(self, open_store: OpenStore) -> None:
        old, new = await open_store("old"), await open_store("new")
        writer = await hold(old)
        await writer.fold({"session.json": b"first"})
        await take(new)
        await lost(writer.fold({"session.json": b"late"}))
        assert await folded(new) == {"session.json": Document(b"first", 1)}

    async def test_the_new_holder_folds_over_the_old_ones(self, open_store: OpenStore) -> None:
        for round_ in range(3):
            store = await open_store(f"owner-{round_}")
            writer = await hold(store)
            await writer.fold({"session.json": b"%d" % round_})
            got = await store.read_documents(KEY)
            assert got.found["session.json"] == Document(b"%d" % round_, writer.head)
            assert got.manifest is not None
            assert got.manifest.epoch == writer.epoch

    async def test_a_fold_takes_nothing_from_the_log(self, store: Store) -> None:
        writer = await hold(store, "a", "b")
        await writer.fold(SESSION)
        await writer.add("c")
        assert await appended(store) == group("a", "b") + group("c")
        assert await appended(store, after=3) == group("c")
        assert await store.head(KEY) == 4

    async def test_sessions_do_not_share_documents(self, store: Store) -> None:
        keys = [KEY, SessionKey("agent", "other"), SessionKey("agent", tenant="t")]
        for key in keys:
            await (await hold(store, key=key)).fold({"session.json": str(key).encode()})
        for key in keys:
            assert (await folded(store, key))["session.json"].data == str(key).encode()

    async def test_a_manifest_of_a_newer_format_is_refused(self, store: Store) -> None:
        await (await hold(store)).fold(SESSION, format=FORMAT + 1)
        with pytest.raises(UnsupportedVersionError):
            await store.read_documents(KEY)

    async def test_several_are_read_as_each_is(self, store: Store) -> None:
        many = shortcut(store, SupportsReadMany)
        if many is None:
            return
        keys = [SessionKey(name, tenant=tenant) for name in "ab" for tenant in ("", "t")]
        for key in keys:
            writer = await hold(store, "a", "b", key=key)
            if key.agent == "a":
                await writer.fold({"session.json": b"{}", "other.json": b"[]"})
                await writer.add("after")
        gone = await hold(store, key=SessionKey("gone"))
        await gone.delete()
        keys = [SessionKey("never"), gone.key, *reversed(keys)]
        for key, records in zip(keys, await many.read_logs(keys), strict=True):
            assert records is not None
            assert [*records] == await read(store, key)
        found = await many.read_many_for_restore(keys, {"session.json"})
        for key, data in zip(keys, found, strict=True):
            assert data is not None
            assert data.documents.found == (await store.read_documents(key, {"session.json"})).found
            assert [*(data.records or ())] == await read(store, key, after=data.after)


# Blobs: bytes under the name of their content, and the sweep of unreferenced ones


_DATA = b"a large tool result"
_NAME = name_of(_DATA)


class BlobConformance(Suite):
    """A blob is returned verified, and is removed only after two sweeps without a reference."""

    added_bytes: int = 0
    """By how many bytes the store makes a small blob larger, which count as freed with it."""

    def _size(self, *blobs: bytes) -> int:
        return sum(len(data) + self.added_bytes for data in blobs)

    async def test_an_unknown_blob_is_none(self, store: Store) -> None:
        assert await store.get_blob("", _NAME) is None

    async def test_blobs_come_back(self, store: Store, open_store: OpenStore) -> None:
        blobs = {name_of(data): data for data in (_DATA, b"", bytes(range(256)) * 999)}
        await store.put_blobs("", blobs)
        await store.put_blobs("", {_NAME: _DATA})
        await store.put_blobs("", {})
        other = await open_store("other")
        for name, data in blobs.items():
            assert await other.get_blob("", name) == data

    async def test_tenants_do_not_share_blobs(self, store: Store) -> None:
        await store.put_blobs("a", {_NAME: _DATA})
        assert await store.get_blob("b", _NAME) is None
        assert await store.get_blob("", _NAME) is None
        await store.put_blobs("b", {_NAME: _DATA})
        for _ in range(2):
            await store.sweep("a", (), 0)
        assert await store.get_blob("a", _NAME) is None
        assert await store.get_blob("b", _NAME) == _DATA

    @pytest.mark.parametrize("tenant", ["tenant", "t" * 300])
    async def test_a_session_s_blobs_are_in_its_tenant(self, store: Store, tenant: str) -> None:
        """They may be kept apart there; who knows the session, and its key, finds them."""
        key, missing = SessionKey("a", tenant=tenant), name_of(b"never was")
        await take(store, key)
        await store.put_blobs(key.blobs, {_NAME: _DATA})
        assert await store.get_blob(key.blobs, _NAME) == _DATA
        assert await store.blob_names(key.blobs) == [_NAME]
        assert await store.renew(key.blobs, {_NAME, missing}) == {missing}
        assert await store.get_blob("", _NAME) is None
        listed = await listed_blobs(store, key, {_NAME})
        there = await store.blob_names(tenant)
        assert [listed[name] for name in there] == [_NAME]
        for _ in range(2):
            await store.sweep(tenant, listed, 0)
        assert await store.get_blob(key.blobs, _NAME) == _DATA
        assert await store.remove_blobs(tenant, there) > 0
        assert await store.get_blob(key.blobs, _NAME) is None

    async def test_bytes_that_do_not_match_their_name_are_not_returned(self, store: Store) -> None:
        try:
            await store.put_blobs("", {_NAME: b"other bytes"})
        except PerdureError:
            assert await store.get_blob("", _NAME) is None
        else:
            with pytest.raises(CorruptRecordError):
                await store.get_blob("", _NAME)

    async def test_names_of_a_wrapper_s_own_are_kept(self, store: Store) -> None:
        """Encoded blobs have names that begin with x, and prove nothing here."""
        data, names = b"sealed", ("x" + _NAME, "x" + "0" * 96)
        await store.put_blobs("", dict.fromkeys(names, data))
        assert [await store.get_blob("", name) for name in names] == [data, data]
        assert sorted(await store.blob_names("")) == sorted(names)
        assert await store.sweep("", {names[0]}, 0) == BlobSweep(quarantined=1)
        assert await store.sweep("", {names[0]}, 0) == BlobSweep(removed=1, bytes=len(data))
        assert await store.remove_blobs("", names) == len(data)
        assert await store.blob_names("") == []

    async def test_names_are_those_of_what_can_be_read(self, store: Store) -> None:
        assert await store.blob_names("") == []
        blobs = {name_of(data): data for data in (_DATA, b"", b"another")}
        await store.put_blobs("", blobs)
        await store.put_blobs("tenant", {_NAME: _DATA})
        await store.sweep("", {name_of(b"another")}, 0)
        assert sorted(await store.blob_names("")) == sorted(blobs)
        assert await store.blob_names("tenant") == [_NAME]
        assert await store.blob_names("nobody's") == []

    async def test_what_is_removed_is_gone_at_once(self, store: Store) -> None:
        kept_names, moved = b"kept", b"moved away"
        blobs = {name_of(data): data for data in (_DATA, kept_names, moved)}
        await store.put_blobs("", blobs)
        await store.put_blobs("tenant", {_NAME: _DATA})
        await store.sweep("", {_NAME, name_of(kept_names)}, 0)
        names = [_NAME, name_of(moved), name_of(b"never was"), "../owners"]
        assert await store.remove_blobs("", names) == self._size(_DATA, moved)
        assert await store.blob_names("") == [name_of(kept_names)]
        assert await store.get_blob("", _NAME) is None
        assert await store.get_blob("", name_of(moved)) is None
        assert await store.get_blob("", name_of(kept_names)) == kept_names
        assert await store.get_blob("tenant", _NAME) == _DATA
        assert await store.remove_blobs("", names) == 0
        await store.put_blobs("", {_NAME: _DATA})
        assert await store.get_blob("", _NAME) == _DATA

    async def test_a_sweep_moves_away_before_it_removes(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA
        swept = await store.sweep("", (), 0)
        assert swept == BlobSweep(removed=1, bytes=self._size(_DATA))
        assert await store.get_blob("", _NAME) is None
        assert await store.sweep("", (), 0) == BlobSweep()

    async def test_a_sweep_leaves_what_is_reachable_or_young(self, store: Store) -> None:
        young = b"young"
        await store.put_blobs("", {_NAME: _DATA, name_of(young): young})
        for _ in range(3):
            assert await store.sweep("", (), 3600) == BlobSweep()
            assert await store.sweep("", {_NAME, name_of(young)}, 0) == BlobSweep()
        assert await store.get_blob("", _NAME) == _DATA

    async def test_a_sweep_among_some_looks_at_no_others(self, store: Store) -> None:
        other, kept = b"other", b"kept"
        names = {_NAME, name_of(kept), name_of(b"never was"), "../owners"}
        await store.put_blobs("", {name_of(data): data for data in (_DATA, other, kept)})
        await store.put_blobs("tenant", {_NAME: _DATA})
        await store.sweep("", {_NAME, name_of(kept)}, 0)
        assert await store.sweep("", (), 0, among=names) == BlobSweep(quarantined=2)
        assert await store.renew("", [name_of(kept)]) == set()
        swept = await store.sweep("", {name_of(kept)}, 0, among=names)
        assert swept == BlobSweep(removed=1, bytes=self._size(_DATA))
        assert sorted(await store.blob_names("")) == sorted([name_of(other), name_of(kept)])
        assert await store.sweep("", (), 0, among=[name_of(kept)]) == BlobSweep(quarantined=1)
        assert await store.sweep("", (), 0, among=()) == BlobSweep()
        assert await store.get_blob("", name_of(other)) == other
        assert await store.get_blob("tenant", _NAME) == _DATA

    @pytest.mark.parametrize("how", ["reached", "put"])
    async def test_what_is_reached_or_put_again_comes_back(self, store: Store, how: str) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        await store.sweep("", (), 0)
        if how == "put":
            await store.put_blobs("", {_NAME: _DATA})
            assert (await store.sweep("", (), 3600)).removed == 0
        else:
            assert (await store.sweep("", {_NAME}, 0)).removed == 0
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA

    async def test_what_is_renewed_is_young(self, store: Store, other: Store) -> None:
        gone, old = name_of(b"never was"), name_of(b"old")
        await store.put_blobs("", {_NAME: _DATA, old: b"old"})
        await store.put_blobs("tenant", {gone: b"never was"})
        put_at = time.monotonic()
        await anyio.sleep(self.clock_step)
        assert await other.renew("", {_NAME, gone}) == {gone}
        assert await other.renew("", []) == set()
        assert await other.renew("nobody's", {_NAME}) == {_NAME}
        since = time.monotonic() - put_at - self.clock_step / 2
        assert await store.sweep("", (), since) == BlobSweep(quarantined=1)
        assert await store.sweep("", (), 0) == BlobSweep(1, 1, self._size(b"old"))

    async def test_what_is_renewed_comes_back(self, store: Store, other: Store) -> None:
        """A sweep that began before has moved it away, and does not remove it."""
        lost = name_of(b"lost")
        await store.put_blobs("", {_NAME: _DATA, lost: b"lost"})
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=2)
        assert await other.renew("", [_NAME]) == set()
        assert await store.sweep("", (), 0) == BlobSweep(1, 1, self._size(b"lost"))
        assert await other.renew("", [lost, _NAME]) == {lost}
        assert await other.get_blob("", _NAME) == _DATA
        assert await store.blob_names("") == [_NAME]

    async def test_what_is_renewed_beside_a_sweep_is_there(
        self, store: Store, other: Store
    ) -> None:
        missing = set[str]()

        async def renew(names: Collection[str]) -> None:
            missing.update(await other.renew("", names))

        for round_ in range(8):
            blobs = {name_of(data): data for n in range(8) if (data := b"%d %d" % (round_, n))}
            await store.put_blobs("", blobs)
            await store.sweep("", (), 0)
            await together(partial(store.sweep, "", (), 0), partial(renew, list(blobs)))
            for name, data in blobs.items():
                assert await other.get_blob("", name) == (None if name in missing else data)


# The directory: every session under its own name, with any characters; and deletion


_HOSTILE = (
    "..",
    ".",
    "a",
    "A",
    "a/b",
    "a\\b",
    "/",
    "~",
    "CON",
    "con",
    "nul.txt",
    "lpt1",
    " ",
    "a ",
    "a.",
    "-rf",
    "=41",
    "*?:|<>\"'",
    "%2e%2e",
    "\u00e9",  # NFC
    "e\u0301",  # NFD
    "\ufb01\u202e\U0001f600",
    "log",
    "sessions",
    "session.json",
    "lease-1.json",
    "x" * 150,
    "x" * 151,
    "x" * 1023 + "1",
    "x" * 1023 + "2",
    "é" * 512,
)


class DirectoryConformance(Suite):
    """No id can reach another's session, and a listing has each session once, by key."""

    async def test_no_id_is_another(self, store: Store) -> None:
        keys = [SessionKey(name) for name in _HOSTILE]
        keys += [SessionKey("one agent", name) for name in _HOSTILE]
        keys += [SessionKey("a", tenant=name) for name in _HOSTILE]
        for key in keys:
            grant = (await hold(store, repr(key), key=key)).grant
            assert (grant.epoch, grant.created) == (1, True), key
        for key in keys:
            assert await appended(store, key) == group(repr(key)), key
        got = await found(store, limit=1000)
        assert got == sorted(key for key in keys if not key.tenant)
        for name in _HOSTILE:
            assert await found(store, tenant=name) == [SessionKey("a", tenant=name)]

    async def test_pages_join_up(self, store: Store) -> None:
        keys = [SessionKey(f"agent-{n % 7}", f"s{n}") for n in range(20)]
        keys += [SessionKey("Agent"), SessionKey("agent-3")]
        for key in keys:
            await take(store, key)
        for size in (1, 3, 7, 22, 100):
            assert await paged(store, SessionQuery(limit=size)) == sorted(keys), size

    async def test_a_prefix_is_of_the_agent_id(self, store: Store) -> None:
        for name in ("app/one", "app/two", "App/three", "other", "ap"):
            await take(store, SessionKey(name))
        await take(store, SessionKey("x", "app/one"))
        assert await ids(store, prefix="app/") == ["app/one", "app/two"]
        assert await ids(store, prefix="app/", limit=1) == ["app/one"]
        assert await ids(store, prefix="zzz") == []
        assert await ids(store, tenant="nobody's") == []

    async def test_after_need_not_be_a_session(self, store: Store) -> None:
        for name in ("a", "c"):
            await take(store, SessionKey(name))
        assert await ids(store, after=SessionKey("b")) == ["c"]

    async def test_a_listing_knows_what_was_folded(self, store: Store) -> None:
        writer = await hold(store, "a", "b")
        await writer.fold(SESSION, counters={"turns": 7})
        (info,) = await store.sessions()
        assert (info.key, info.epoch, info.turns) == (KEY, writer.epoch, 7)
        assert info.head >= writer.head

    async def test_owner_and_tag_choose(self, store: Store) -> None:
        labels = {
            "a": About(owner="ada", tags=("x", "y")),
            "b": About(owner="bob", tags=("y",)),
            "c": About(owner="ada"),
            "d": About(tags=("x y", "y")),
            "e": About(),
        }
        for name, about in labels.items():
            await (await hold(store, key=SessionKey(name))).fold(SESSION, about=about)
        wanted: list[tuple[dict[str, Any], str]] = [
            ({"owner": "ada"}, "ac"),
            ({"tag": "y"}, "abd"),
            ({"owner": "ada", "tag": "y"}, "a"),
            ({"tag": "y", "prefix": "b"}, "b"),
            ({"owner": ""}, ""),
            ({"tag": "y", "limit": 2}, "ab"),
            ({"tag": "y", "limit": 2, "after": SessionKey("b")}, "d"),
            ({"owner": "ada", "tenant": "other"}, ""),
        ]
        for filters, names in wanted:
            assert await ids(store, **filters) == [*names], filters

    async def test_a_listing_knows_what_a_session_begins_with(
        self, store: Store, other: Store
    ) -> None:
        beginning = Beginning(about=About(title="Plans", owner="ada", tags=("x", "y")))
        for name in ("a", "b"):
            key, terms = SessionKey(name), Terms(me=store.owner, after=0, beginning=beginning)
            assert isinstance(await store.acquire(key, terms), Taken)
        for each in (store, other):
            (info, _) = await each.sessions(SessionQuery(owner="ada", tag="y"))
            assert (info.title, info.owner, info.tags) == ("Plans", "ada", ("x", "y"))
            assert info.created_at is not None
            assert info.updated_at is not None

    async def test_labels_outlive_a_fold_and_the_save_after_it(self, store: Store) -> None:
        about = About(title="Plans", owner="ada", tags=("x",))
        writer = await hold(store)
        await save(writer, turns=1, about=about)
        await writer.fold(SESSION, counters={"turns": 1}, about=about)
        await save(writer, turns=2)
        (info,) = await store.sessions(SessionQuery(owner="ada", tag="x"))
        assert (info.title, info.owner, info.tags) == ("Plans", "ada", ("x",))
        assert info.turns == 2

    async def test_a_listing_knows_what_was_saved(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        await save(writer, turns=1, about=About(owner="ada"))
        await save(writer, turns=2)
        (info,) = await store.sessions(SessionQuery(owner="ada"))
        assert (info.turns, info.title) == (2, None)
        # A fold that is as of an earlier record comes late.
        await save(writer, turns=3, about=About(title="Later", owner="bob", tags=("z",)))
        await writer.fold(SESSION, as_of=2, counters={"turns": 1}, about=About(owner="ada"))
        assert await store.sessions(SessionQuery(owner="ada")) == []
        (info,) = await store.sessions(SessionQuery(owner="bob", tag="z"))
        assert info.turns == 3
        (info,) = await other.sessions(SessionQuery(owner="bob", tag="z"))
        assert info.title == "Later"
        await save(writer)
        assert (await store.sessions())[0].turns == 3
        # One that is as of the newest says as much as the saves.
        await writer.fold(SESSION, counters={"turns": 4}, about=About(owner="eve"))
        (info,) = await other.sessions(SessionQuery(owner="eve"))
        assert (info.turns, info.title, info.tags) == (4, None, ())

    async def test_a_new_life_is_not_listed_as_the_last(self, store: Store) -> None:
        writer = await hold(store)
        await save(writer, turns=5, about=About(owner="ada", title="Old"))
        await writer.delete()
        assert await store.sessions() == []
        await take(store)
        (info,) = await store.sessions()
        assert (info.turns, info.owner, info.title) == (0, None, None)
        assert await store.sessions(SessionQuery(owner="ada")) == []

    async def test_the_newest_activity_is_listed_first(self, store: Store) -> None:
        writers = {name: await hold(store, key=SessionKey(name)) for name in "abcdef"}
        for turn, name in enumerate("fabdec", 1):
            about = About(owner="ada" if name in "abc" else "bob", tags=("x",) * (name in "bd"))
            await save(writers[name], turns=turn, about=about)
        await writers["a"].release()  # closing one is no activity
        await take(store, SessionKey("f"))  # nor is opening
        wanted = [
            ({}, "cedbaf"),
            ({"owner": "ada"}, "cba"),
            ({"tag": "x"}, "db"),
            ({"prefix": "c"}, "c"),
        ]
        for filters, names in wanted:
            assert await ids(store, newest_first=True, **filters) == [*names], filters
        for size in (1, 2, 4, 6):
            got = await paged(store, SessionQuery(newest_first=True, limit=size))
            assert [key.agent for key in got] == [*"cedbaf"], size

    async def test_a_range_of_time_chooses(self, store: Store) -> None:
        writers = {name: await hold(store, key=SessionKey(name)) for name in "abc"}
        for name in "bca":
            await save(writers[name], turns=1)
        infos = await store.sessions(SessionQuery(newest_first=True))
        assert [info.key.agent for info in infos] == [*"acb"]
        newest, middle, _ = [info.updated_at or 0.0 for info in infos]
        assert await ids(store, since=middle) == ["a", "c"]
        assert await ids(store, before=newest) == ["b", "c"]
        assert await ids(store, since=middle, before=newest, newest_first=True) == ["c"]
        assert await ids(store, since=newest + 1000) == []

    async def test_agents_are_left_out(self, store: Store) -> None:
        for name, session in (("a", "one"), ("a", "two"), ("ab", "one"), ("b", "one")):
            await take(store, SessionKey(name, session))
        without = ("a", "other")
        assert await ids(store, without=without) == ["ab", "b"]
        assert await ids(store, without=without, limit=1) == ["ab"]
        assert await ids(store, without=without, newest_first=True) == ["b", "ab"]

    async def test_tenants_are_listed(self, store: Store) -> None:
        assert await store.tenants() == []
        names = ["A", "a", "a/b", "..", "t" * 300]
        for tenant in names:
            await take(store, SessionKey("agent", tenant=tenant))
        assert await store.tenants() == sorted(names)
        await take(store)
        assert await store.tenants() == ["", *sorted(names)]
        if store.capabilities.blobs:
            await store.put_blobs("blobs only", {name_of(b"a"): b"a"})
            assert await store.tenants() == sorted(["", *names, "blobs only"])

    async def test_scrubbing_leaves_what_is_there(self, store: Store) -> None:
        writer = await hold(store, "kept")
        removed = await hold(store, "removed", key=SessionKey("gone"))
        await removed.delete()
        await store.scrub()
        assert await appended(store) == group("kept")
        await writer.add("and on")
        assert await read(store, removed.key) == []

    async def test_looking_makes_no_session(self, store: Store) -> None:
        await store.holder(KEY)
        await store.head(KEY)
        await read(store)
        await store.read_documents(KEY)
        assert await store.sessions() == []

    async def test_what_is_deleted_is_gone(self, store: Store, other: Store) -> None:
        kept = SessionKey("agent", "kept")
        for key in (KEY, kept):
            await (await hold(store, "a", key=key)).fold(SESSION)
        await store.delete(KEY, 1)
        for witness in (store, other):
            assert await read(witness) == []
            assert await witness.head(KEY) == 0
            documents = await witness.read_documents(KEY)
            assert (documents.found, documents.manifest) == ({}, None)
            assert await found(witness) == [kept]
            assert await appended(witness, kept) == group("a")

    async def test_nobody_writes_into_a_deleted_session(self, store: Store) -> None:
        writer = await hold(store)
        await writer.delete()
        assert await writer.send(2, "late") is Status.CONFLICT
        await lost(writer.fold({}))
        assert await read(store) == []

    async def test_epochs_never_start_again(self, store: Store, other: Store) -> None:
        old = await hold(store, "first life")
        await old.delete()
        holder = await held(other)
        assert holder.deleted
        assert holder.epoch >= old.epoch
        new = await hold(store)
        assert new.epoch > old.epoch
        assert (new.head, new.grant.created) == (1, True)
        await new.add("second life")
        assert await old.send(3, "zombie") is Status.CONFLICT
        assert await appended(store) == group("second life")
        assert not (await held(store)).deleted

    async def test_only_the_holder_deletes(self, store: Store, other: Store) -> None:
        old = await hold(store)
        await take(other)
        await lost(old.delete())
        await lost(store.delete(SessionKey("never was"), 1))
        assert await store.head(KEY) == 2


async def save(writer: SessionWriter, **listed: Any) -> None:
    """Append a record, with what it says for the directory."""
    batch = Batch(writer.key, writer.epoch, writer.head + 1, group("a"), **listed)
    (outcome,) = await writer.store.append_many([batch])
    assert outcome.status is Status.OK, outcome
    writer.head += 1


async def found(store: Store, **filters: Any) -> list[SessionKey]:
    """Return the keys of the sessions that fit."""
    return [info.key for info in await store.sessions(SessionQuery(**filters))]


async def ids(store: Store, **filters: Any) -> list[str]:
    """Return the agents of the sessions that fit."""
    return [key.agent for key in await found(store, **filters)]


async def paged(store: Store, query: SessionQuery) -> list[SessionKey]:
    """Return the keys of all pages, none of which may be longer than the query says."""
    keys: list[SessionKey] = []
    while page := await store.sessions(query):
        assert len(page) <= query.limit
        keys += [info.key for info in page]
        query = query.after_page(page[-1])
    return keys
