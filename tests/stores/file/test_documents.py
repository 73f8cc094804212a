"""Documents on files: a fold that is cut anywhere, damage, and whose evidence is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import LeaseLostError, StoreUnavailableError
from perdure.records.manifest import FoldedDocument
from perdure.store import Document, Documents, Terms
from perdure.stores.file import acquire, documents
from perdure.testing.conformance._kit import append_ok, group, manifest_of, take
from tests.stores.file.kit import KEY, contents

OLD = {"session.json": b"old", "plugins/x.json": b"old"}
NEW = {"session.json": b"new", "plugins/x.json": b"new"}


async def folded(store):
    grant = await take(store)
    await store.write_documents(KEY, OLD, manifest_of(grant, 1, OLD))
    head = await append_ok(store, grant, 2, *group("a"))
    return grant, head


async def test_documents_lie_readable_at_their_names(store, root: Path) -> None:
    await folded(store)
    names = contents(root / "agents/agent").keys()
    assert names == {"lease-1.json", "log/1-0.jsonl", "manifest-1.json", *OLD}


async def test_a_fold_that_fails_at_any_step_leaves_each_document_old_or_new(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure._lib.files import Folder

    grant, head = await folded(store)
    reader = await open_store("reader")
    original = Folder.rename
    left = [0]

    def rename(self, *args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return original(self, *args, **kwargs)

    for fail_at in range(1, 10):
        left[0] = fail_at
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "rename", rename)
            try:
                await store.write_documents(KEY, NEW, manifest_of(grant, head, NEW))
            except StoreUnavailableError:
                failed = True
            else:
                failed = False
        got = await reader.read_documents(KEY)
        assert got.damaged == ()
        assert got.found.keys() == OLD.keys()
        assert got.manifest is not None
        for name, document in got.found.items():
            assert document in (Document(b"old", 1), Document(b"new", head))
            listed = FoldedDocument.of(document.as_of_seq, document.data)
            assert got.manifest.documents[name] == listed  # so that a copy of both is whole
        if not failed:
            break
        await store.write_documents(KEY, OLD, manifest_of(grant, 1, OLD))
    assert fail_at == 5
    assert not [name for name in contents(root) if name.endswith((".tmp", ".next"))]


async def test_damage_is_copied_by_the_holder_before_it_is_written_over(
    store, open_store, root: Path
) -> None:
    grant, head = await folded(store)
    path = root / "agents/agent/session.json"
    path.write_bytes(b"damaged")
    reader = await open_store("reader")
    for who in (reader, store, store):
        got = await who.read_documents(KEY)
        assert got.damaged == ("session.json",)
        assert got.found == {"plugins/x.json": Document(b"old", 1)}
        if who is reader:
            assert not (root / "agents/agent/quarantine").exists()
    (copy,) = (root / "agents/agent/quarantine").iterdir()
    assert copy.read_bytes() == b"damaged"
    await store.write_documents(KEY, NEW, manifest_of(grant, head, NEW))
    assert copy.read_bytes() == b"damaged"
    assert not (await store.read_documents(KEY)).damaged


async def test_damage_on_a_full_disk_is_told_all_the_same(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the damage is a help, not a duty: what can be read stays readable."""
    await folded(store)
    (root / "agents/agent/session.json").write_bytes(b"damaged")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    got = await store.read_documents(KEY)
    assert got.damaged == ("session.json",)
    assert got.found == {"plugins/x.json": Document(b"old", 1)}


async def test_any_flip_in_a_manifest_or_document_is_found(store, open_store, root: Path) -> None:
    await folded(store)
    reader = await open_store("reader")
    good = await reader.read_documents(KEY)
    for name in ("manifest-1.json", *OLD):
        path = root / "agents/agent" / name
        data = path.read_bytes()
        for place in range(len(data)):
            bad = bytearray(data)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            got = await reader.read_documents(KEY)
            assert got.found.items() < good.found.items()
            if name in OLD:
                assert got.damaged == (name,)
            else:
                assert got.manifest is None
        path.write_bytes(data)
    assert await reader.read_documents(KEY) == good


async def test_a_document_that_an_old_holder_wrote_late_is_damaged(
    store, open_store, root: Path
) -> None:
    await folded(store)
    other = await open_store("other")
    grant = await take(other)
    await other.write_documents(KEY, NEW, manifest_of(grant, grant.head, NEW))
    (root / "agents/agent/session.json").write_bytes(b"late")
    got = await other.read_documents(KEY)
    assert got.damaged == ("session.json",)
    assert got.found["plugins/x.json"].data == b"new"


async def test_a_fold_that_ends_while_manifests_are_read_is_no_damage(
    store, open_store, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the old manifest, and looks for the coming one when it is in place."""
    from perdure._lib.files import Folder

    grant, head = await folded(store)
    here, after = root / "agents/agent", tmp_path / "after"
    before = contents(here)
    await store.write_documents(KEY, NEW, manifest_of(grant, head, NEW))
    shutil.copytree(here, after)
    for name, data in before.items():
        (here / name).write_bytes(data)
    reader = await open_store("reader")
    names, read = Folder.names, Folder.read
    begun: list[str] = []

    def read_amid_a_fold(self: Folder, name: str) -> bytes | None:
        if name == "session.json" and not begun:  # the old manifest was read: a fold begins
            begun.append(name)
            shutil.copy(after / "manifest-1.json", here / "manifest-1.next")
            for document in NEW:
                shutil.copy(after / document, here / document)
        data = read(self, name)
        if name == "manifest-1.json" and (here / "manifest-1.next").exists():
            (here / "manifest-1.next").rename(here / "manifest-1.json")
        return data

    monkeypatch.setattr(Folder, "read", read_amid_a_fold)
    monkeypatch.setattr(Folder, "names", lambda self: sorted(names(self)))
    got = await reader.read_documents(KEY)
    assert not (here / "manifest-1.next").exists()
    assert got.damaged == ()
    assert {name: one.data for name, one in got.found.items()} == NEW


async def test_documents_that_go_with_their_session_while_they_are_read_are_no_damage(
    store, open_store, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion has removed them by then, and not yet the manifest that lists them."""
    grant, _ = await folded(store)
    here, after = root / "agents/agent", tmp_path / "after"
    before = contents(here)
    await store.delete(KEY, grant.epoch)
    shutil.copytree(here, after)
    for name in contents(here).keys() - before.keys():
        (here / name).unlink()
    for name, data in before.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(data)
    reader, read = await open_store("reader"), documents.read
    assert (await reader.read_documents(KEY, ["session.json"])).found

    def read_amid_a_deletion(*args: Any, **options: Any) -> Documents:
        monkeypatch.setattr(documents, "read", read)
        for name in before.keys() - {"manifest-1.json"}:
            (here / name).unlink()
        shutil.copytree(after, here, dirs_exist_ok=True)
        return read(*args, **options)

    monkeypatch.setattr(documents, "read", read_amid_a_deletion)
    assert await reader.read_documents(KEY, ["session.json"]) == Documents()


async def test_a_fold_that_is_overtaken_in_the_middle_replaces_no_manifest(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure._lib.files import Folder

    grant, head = await folded(store)
    other = await open_store("other")
    original = Folder.rename
    done = []

    def rename(self, name, new, *args, **kwargs):
        original(self, name, new, *args, **kwargs)
        if new == "session.json" and not done:
            done.append(new)
            acquire.acquire(other._root, KEY, Terms(me=other.owner, after=1), other._owners)

    monkeypatch.setattr(Folder, "rename", rename)
    with pytest.raises(LeaseLostError):
        await store.write_documents(KEY, NEW, manifest_of(grant, head, NEW))
    assert done
    got = await other.read_documents(KEY)
    assert got.manifest is not None
    assert got.manifest.as_of_seq == 1
    assert not got.damaged
    assert got.found["plugins/x.json"] in (Document(b"old", 1), Document(b"new", head))
    taken = await take(other)
    await other.write_documents(KEY, OLD, manifest_of(taken, taken.head, OLD))
    assert {name for name in contents(root / "agents/agent") if "manifest" in name} == {
        f"manifest-{taken.epoch}.json"
    }


async def test_what_is_no_longer_listed_is_removed_with_its_folder(store, root: Path) -> None:
    grant, head = await folded(store)
    one = {"session.json": b"new"}
    await store.write_documents(KEY, one, manifest_of(grant, head, one))
    assert not (root / "agents/agent/plugins").exists()


async def test_what_a_damaged_manifest_listed_goes_with_its_session(store, root: Path) -> None:
    """Whoever is forgotten is, whatever happened to the list of what is known."""
    grant, _ = await folded(store)
    manifest = root / f"agents/agent/manifest-{grant.epoch}.json"
    manifest.write_bytes(manifest.read_bytes()[:-2])
    found = await store.read_documents(KEY)
    assert (found.manifest, set(found.damaged)) == (None, set(OLD))
    await store.delete(KEY, grant.epoch)
    assert not [name for name in contents(root / "agents/agent") if "lease" not in name]


async def test_a_link_in_a_document_s_place_is_not_followed(
    store, root: Path, tmp_path: Path
) -> None:
    grant, head = await folded(store)
    outside = tmp_path / "outside"
    outside.write_bytes(b"old")
    path = root / "agents/agent/session.json"
    path.unlink()
    path.symlink_to(outside)
    await store.write_documents(KEY, NEW, manifest_of(grant, head, NEW))
    assert outside.read_bytes() == b"old"
    assert not path.is_symlink()


async def test_a_damaged_manifest_is_copied_before_the_next_epoch_s_replaces_it(
    store, open_store, root: Path
) -> None:
    await folded(store)
    agent = root / "agents/agent"
    (agent / "manifest-1.json").write_bytes(b"damaged")
    other = await open_store("other")
    grant = await take(other)
    await other.write_documents(KEY, NEW, manifest_of(grant, grant.head, NEW))
    assert not (agent / "manifest-1.json").exists()
    copies = [one.read_bytes() for one in (agent / "quarantine").iterdir()]
    assert b"damaged" in copies
