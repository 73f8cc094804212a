"""The directory: every session under its own name, with any characters; and deletion."""
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure.errors import LeaseLostError
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.store import Status, Store
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    name_of,
    read,
    take,
)

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
            grant = await take(store, key)
            assert (grant.epoch, grant.created) == (1, True), key
            await append_ok(store, grant, 2, *group(repr(key)))
        for key in keys:
            assert tuple(entries(await read(store, key))) == group(repr(key)), key
        got = [info.key for info in await store.sessions(limit=1000)]
        assert got == sorted(key for key in keys if not key.tenant)
        for name in _HOSTILE:
            got = [info.key for info in await store.sessions(tenant=name)]
            assert got == [SessionKey("a", tenant=name)]

    async def test_pages_join_up(self, store: Store) -> None:
        keys = [SessionKey(f"agent-{n % 7}", f"s{n}") for n in range(20)]
        keys += [SessionKey("Agent"), SessionKey("agent-3")]
        for key in keys:
            await take(store, key)
        for size in (1, 3, 7, 22, 100):
            got: list[SessionKey] = []
            page = await store.sessions(limit=size)
            while page:
                assert len(page) <= size
                got += [info.key for info in page]
                page = await store.sessions(limit=size, after=got[-1])
            assert got == sorted(keys), size

    async def test_a_prefix_is_of_the_agent_id(self, store: Store) -> None:
        for name in ("app/one", "app/two", "App/three", "other", "ap"):
            await take(store, SessionKey(name))
        await take(store, SessionKey("x", "app/one"))
        got = [info.key.agent for info in await store.sessions(prefix="app/")]
        assert got == ["app/one", "app/two"]
        got = [info.key.agent for info in await store.sessions(prefix="app/", limit=1)]
        assert got == ["app/one"]
        assert await store.sessions(prefix="zzz") == []
        assert await store.sessions(tenant="nobody's") == []

    async def test_after_need_not_be_a_session(self, store: Store) -> None:
        for name in ("a", "c"):
            await take(store, SessionKey(name))
        got = await store.sessions(after=SessionKey("b"))
        assert [info.key.agent for info in got] == ["c"]

    async def test_a_listing_knows_what_was_folded(self, store: Store) -> None:
        grant = await take(store)
        head = await append_ok(store, grant, 2, *group("a", "b"))
        documents = {"session.json": b"{}"}
        manifest = manifest_of(grant, head, documents, counters={"turns": 7})
        await store.write_documents(KEY, documents, manifest)
        (info,) = await store.sessions()
        assert (info.key, info.epoch, info.turns) == (KEY, grant.epoch, 7)
        assert info.head >= head

    async def test_owner_and_tag_choose(self, store: Store) -> None:
        about = {
            "a": {"owner": "ada", "tags": ["x", "y"]},
            "b": {"owner": "bob", "tags": ["y"]},
            "c": {"owner": "ada", "tags": []},
            "d": {"tags": ["x y", "y"]},
            "e": {},
        }
        for name, metadata in about.items():
            grant = await take(store, SessionKey(name))
            documents = {"session.json": msgspec.json.encode({"metadata": metadata})}
            known = msgspec.convert(metadata, About)
            manifest = manifest_of(grant, 1, documents, about=known)
            await store.write_documents(grant.key, documents, manifest)
        assert await ids(store, owner="ada") == ["a", "c"]
        assert await ids(store, tag="y") == ["a", "b", "d"]
        assert await ids(store, owner="ada", tag="y") == ["a"]
        assert await ids(store, tag="y", prefix="b") == ["b"]
        assert await ids(store, owner="") == []
        assert await ids(store, tag="y", limit=2) == ["a", "b"]
        assert await ids(store, tag="y", limit=2, after=SessionKey("b")) == ["d"]
        assert await ids(store, owner="ada", tenant="other") == []

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
        grant = await take(store)
        await append_ok(store, grant, 2, *group("kept"))
        removed = SessionKey("gone")
        await append_ok(store, await take(store, removed), 2, *group("removed"))
        await store.delete(removed, 1)
        await store.scrub()
        assert tuple(entries(await read(store))) == group("kept")
        await append_ok(store, grant, 3, *group("and on"))
        assert await read(store, removed) == []

    async def test_looking_makes_no_session(self, store: Store) -> None:
        await store.holder(KEY)
        await store.head(KEY)
        await read(store)
        await store.read_documents(KEY)
        assert await store.sessions() == []

    async def test_what_is_deleted_is_gone(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        kept_key = SessionKey("agent", "kept")
        for key in (KEY, kept_key):
            grant = await take(store, key)
            head = await append_ok(store, grant, 2, *group("a"))
            documents = {"session.json": b"{}"}
            await store.write_documents(key, documents, manifest_of(grant, head, documents))
        await store.delete(KEY, 1)
        for witness in (store, other):
            assert await read(witness) == []
            assert await witness.head(KEY) == 0
            assert (await witness.read_documents(KEY)).found == {}
            assert (await witness.read_documents(KEY)).manifest is None
            assert [info.key for info in await witness.sessions()] == [kept_key]
            assert tuple(entries(await read(witness, kept_key))) == group("a")

    async def test_nobody_writes_into_a_deleted_session(self, store: Store) -> None:
        grant = await take(store)
        await store.delete(KEY, grant.epoch)
        assert (await append(store, grant, 2, *group("late"))).status is Status.CONFLICT
        with pytest.raises(LeaseLostError):
            await store.write_documents(KEY, {}, manifest_of(grant, 1, {}))
        assert await read(store) == []

    async def test_epochs_never_start_again(self, open_store: OpenStore) -> None:
        store = await open_store("one")
        old = await take(store)
        await append_ok(store, old, 2, *group("first life"))
        await store.delete(KEY, old.epoch)
        holder = await (await open_store("other")).holder(KEY)
        assert holder is not None
        assert holder.deleted
        assert holder.epoch >= old.epoch
        new = await store.acquire(KEY, after=holder.epoch)
        assert new.epoch > old.epoch
        assert (new.head, new.created) == (1, True)
        await append_ok(store, new, 2, *group("second life"))
        assert (await append(store, old, 3, *group("zombie"))).status is Status.CONFLICT
        assert tuple(entries(await read(store))) == group("second life")
        holder = await store.holder(KEY)
        assert holder is not None
        assert not holder.deleted

    async def test_only_the_holder_deletes(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        old = await take(store)
        await take(other)
        with pytest.raises(LeaseLostError):
            await store.delete(KEY, old.epoch)
        with pytest.raises(LeaseLostError):
            await store.delete(SessionKey("never was"), 1)
        assert await store.head(KEY) == 2


async def ids(store: Store, **filters: Any) -> list[str]:
    """Return the agents of the sessions that fit."""
    return [info.key.agent for info in await store.sessions(**filters)]
