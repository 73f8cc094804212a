"""Documents: folded views with a hash each, and the manifest that is replaced last."""

from __future__ import annotations

import msgspec
import pytest

from perdure.errors import CorruptRecordError, LeaseLostError, PerdureError, UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, FoldedDocument
from perdure.store import BlobSweep, Document, Documents, Store
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append_ok,
    entries,
    group,
    manifest_of,
    name_of,
    read,
    take,
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
        grant = await take(store)
        head = await append_ok(store, grant, 2, *group("a", "b"))
        documents = {name: f"content of {name}".encode() for name in _NAMES}
        manifest = manifest_of(grant, head, documents, counters={"turns": 3, "messages": 2})
        await store.write_documents(KEY, documents, manifest)
        got = await store.read_documents(KEY)
        assert got.found == {name: Document(data, head) for name, data in documents.items()}
        assert got.damaged == ()
        assert got.manifest is not None
        # The position is the store's own.
        assert msgspec.structs.replace(got.manifest, position=manifest.position) == manifest

    async def test_documents_outlive_their_store(self, open_store: OpenStore) -> None:
        store = await open_store("one")
        grant = await take(store)
        documents = {"session.json": b"{}"}
        await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
        await store.aclose()
        got = await (await open_store("two")).read_documents(KEY)
        assert got.found == {"session.json": Document(b"{}", 1)}

    async def test_only_the_named_documents_are_read(self, store: Store) -> None:
        grant = await take(store)
        documents = {"session.json": b"1", "memory.json": b"2", "plugins/x.json": b""}
        await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
        got = await store.read_documents(KEY, ["plugins/x.json", "nothing.json"])
        assert got.found == {"plugins/x.json": Document(b"", 1)}
        assert got.damaged == ()
        assert got.manifest is not None
        assert (await store.read_documents(KEY, [])).found == {}

    async def test_each_document_keeps_its_own_as_of(self, store: Store) -> None:
        grant = await take(store)
        both = {"session.json": b"old", "memory.json": b"old"}
        old = manifest_of(grant, 1, both)
        await store.write_documents(KEY, both, old)
        head = await append_ok(store, grant, 2, *group("a"))
        document = {"session.json": b"new"}
        new = manifest_of(grant, head, document)
        listed = {**old.documents, **new.documents}
        await store.write_documents(KEY, document, msgspec.structs.replace(new, documents=listed))
        got = await store.read_documents(KEY)
        assert got.found == {
            "session.json": Document(b"new", head),
            "memory.json": Document(b"old", 1),
        }

    async def test_a_document_that_is_no_longer_listed_is_gone(self, store: Store) -> None:
        grant = await take(store)
        both = {"session.json": b"a", "memory.json": b"b"}
        await store.write_documents(KEY, both, manifest_of(grant, 1, both))
        document = {"session.json": b"a"}
        await store.write_documents(KEY, {}, manifest_of(grant, 1, document))
        got = await store.read_documents(KEY)
        assert got.found == {"session.json": Document(b"a", 1)}
        assert got.damaged == ()

    async def test_what_does_not_match_its_hash_is_damaged(self, store: Store) -> None:
        grant = await take(store)
        documents = {"session.json": b"right", "memory.json": b"right"}
        manifest = manifest_of(grant, 1, documents)
        await store.write_documents(KEY, {**documents, "memory.json": b"wrong"}, manifest)
        got = await store.read_documents(KEY)
        assert got.found == {"session.json": Document(b"right", 1)}
        assert got.damaged == ("memory.json",)

    async def test_what_is_listed_and_not_there_is_damaged(self, store: Store) -> None:
        grant = await take(store)
        documents = {"session.json": b"here"}
        manifest = manifest_of(grant, 1, documents)
        manifest.documents["memory.json"] = FoldedDocument(1, "0" * 64, 4)
        await store.write_documents(KEY, documents, manifest)
        got = await store.read_documents(KEY)
        assert got.found == {"session.json": Document(b"here", 1)}
        assert got.damaged == ("memory.json",)

    async def test_an_old_epoch_folds_nothing(self, open_store: OpenStore) -> None:
        old, new = await open_store("old"), await open_store("new")
        before = await take(old)
        first = {"session.json": b"first"}
        await old.write_documents(KEY, first, manifest_of(before, 1, first))
        await take(new)
        late = {"session.json": b"late"}
        with pytest.raises(LeaseLostError):
            await old.write_documents(KEY, late, manifest_of(before, 1, late))
        got = await new.read_documents(KEY)
        assert got.found == {"session.json": Document(b"first", 1)}

    async def test_the_new_holder_folds_over_the_old_ones(self, open_store: OpenStore) -> None:
        for round_ in range(3):
            store = await open_store(f"owner-{round_}")
            grant = await take(store)
            documents = {"session.json": str(round_).encode()}
            await store.write_documents(KEY, documents, manifest_of(grant, grant.head, documents))
            got = await store.read_documents(KEY)
            assert got.found["session.json"] == Document(str(round_).encode(), grant.head)
            assert got.manifest is not None
            assert got.manifest.epoch == grant.epoch

    async def test_a_fold_takes_nothing_from_the_log(self, store: Store) -> None:
        grant = await take(store)
        head = await append_ok(store, grant, 2, *group("a", "b"))
        documents = {"session.json": b"{}"}
        await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
        await append_ok(store, grant, head + 1, *group("c"))
        assert tuple(entries(await read(store))) == group("a", "b") + group("c")
        assert tuple(entries(await read(store, after=head))) == group("c")
        assert await store.head(KEY) == head + 1

    async def test_sessions_do_not_share_documents(self, store: Store) -> None:
        keys = [KEY, SessionKey("agent", "other"), SessionKey("agent", tenant="t")]
        for key in keys:
            grant = await take(store, key)
            documents = {"session.json": str(key).encode()}
            await store.write_documents(key, documents, manifest_of(grant, 1, documents))
        for key in keys:
            got = await store.read_documents(key)
            assert got.found["session.json"].data == str(key).encode()

    async def test_a_manifest_of_a_newer_format_is_refused(self, store: Store) -> None:
        grant = await take(store)
        documents = {"session.json": b"{}"}
        manifest = manifest_of(grant, 1, documents, format=FORMAT + 1)
        await store.write_documents(KEY, documents, manifest)
        with pytest.raises(UnsupportedVersionError):
            await store.read_documents(KEY)


# Blobs: bytes under the name of their content, and the sweep of unreferenced ones


_DATA = b"a large tool result"
_NAME = name_of(_DATA)


class BlobConformance(Suite):
    """A blob is returned verified, and is removed only after two sweeps without a reference."""

    async def test_an_unknown_blob_is_none(self, store: Store) -> None:
        assert await store.get_blob("", _NAME) is None

    async def test_blobs_come_back(self, open_store: OpenStore) -> None:
        store = await open_store("one")
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

    async def test_bytes_that_do_not_match_their_name_are_not_returned(self, store: Store) -> None:
        try:
            await store.put_blobs("", {_NAME: b"other bytes"})
        except PerdureError:
            assert await store.get_blob("", _NAME) is None
        else:
            with pytest.raises(CorruptRecordError):
                await store.get_blob("", _NAME)

    async def test_names_of_a_wrapper_s_own_are_kept(self, store: Store) -> None:
        """What is sealed or packed has a name that begins with x, and proves nothing here."""
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
        assert await store.remove_blobs("", names) == len(_DATA) + len(moved)
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
        assert await store.sweep("", (), 0) == BlobSweep(removed=1, bytes=len(_DATA))
        assert await store.get_blob("", _NAME) is None
        assert await store.sweep("", (), 0) == BlobSweep()

    async def test_a_sweep_leaves_what_is_reachable_or_young(self, store: Store) -> None:
        young = b"young"
        await store.put_blobs("", {_NAME: _DATA, name_of(young): young})
        for _ in range(3):
            assert await store.sweep("", (), 3600) == BlobSweep()
            assert await store.sweep("", {_NAME, name_of(young)}, 0) == BlobSweep()
        assert await store.get_blob("", _NAME) == _DATA

    async def test_what_is_reached_again_comes_back(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        await store.sweep("", (), 0)
        assert (await store.sweep("", {_NAME}, 0)).removed == 0
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA

    async def test_what_is_put_again_comes_back(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        await store.sweep("", (), 0)
        await store.put_blobs("", {_NAME: _DATA})
        assert (await store.sweep("", (), 3600)).removed == 0
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA
