"""Drafts in files: two marks that decide between publishing and taking over, whatever is killed."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import msgspec
import pytest

from perdure.errors import (
    CorruptRecordError,
    LeaseHeldError,
    LeaseLostError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed
from perdure.store import Draft, SessionQuery, Taken, Terms, past_damage, take_after
from perdure.stores.file import FileStore, acquire, documents, leases
from perdure.testing.conformance._kit import (
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.stores.file.kit import KEY, amid, contents, rewrite_lease

DRAFT = Draft(source=SessionKey("source"), generation=1, up_to=640, purpose="fork")


async def drafted(store: FileStore) -> Taken:
    grant = await take_after(store, KEY, after=0, first=501, draft=DRAFT)
    await append_ok(store, grant, 502, *group("a", "b"))
    return grant


def die(*_: object, **__: object) -> None:
    raise OSError(5, "killed here")


async def test_a_taker_that_dies_before_it_takes_leaves_a_draft(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await drafted(store)
    other = await open_store("other")
    with monkeypatch.context() as patch:
        patch.setattr(leases, "publish", die)
        with pytest.raises(StoreUnavailableError):
            await take_after(other, KEY, after=1)
    assert await read(other) == []
    assert [info.epoch for info in await other.drafts("")] == [1]
    new = await take(other)
    assert (new.epoch, new.head, new.created) == (2, 1, True)
    with pytest.raises(LeaseLostError):
        await store.publish(KEY, grant.epoch)


async def test_a_publisher_that_meets_a_dying_taker_does_not_know_and_leaves_all_or_nothing(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await drafted(store)
    other = await open_store("other")
    with monkeypatch.context() as patch:
        patch.setattr(leases, "publish", die)
        with pytest.raises(StoreUnavailableError):
            await take_after(other, KEY, after=1)
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            await store.publish(KEY, grant.epoch)
        assert tuple(entries(await read(other))) == group("a", "b")
    new = await take(other)
    assert (new.epoch, new.head, new.created) == (2, 504, False)


async def test_a_taker_sees_what_is_published_beneath_it(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher had looked before the taker marked the draft."""
    grant = await drafted(store)
    other = await open_store("other")
    mark = leases.create_mark

    def late(folder, name):
        if name.endswith(".dropped"):
            mark(folder, "lease-1.published")
        mark(folder, name)

    monkeypatch.setattr(leases, "create_mark", late)
    new = await take(other)
    assert (new.epoch, new.head, new.created) == (2, 504, False)
    assert tuple(entries(await read(other))) == group("a", "b")
    holder = await other.holder(KEY)
    assert (holder.deleted, holder.draft) == (False, DRAFT)
    with pytest.raises(LeaseLostError):
        await store.publish(KEY, grant.epoch)


async def test_a_publisher_whose_lease_a_taker_has_just_removed_is_told(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await drafted(store)
    other = await open_store("other")
    read_lease = leases.read_lease

    def taken_before(folder, epoch, names):
        monkeypatch.undo()
        acquire.acquire(other._root, KEY, Terms(me=other.owner, after=epoch), other._owners)
        return read_lease(folder, epoch, names)

    monkeypatch.setattr(leases, "read_lease", taken_before)
    with pytest.raises(LeaseLostError):
        await store.publish(KEY, grant.epoch)


async def test_a_draft_that_was_taken_over_leaves_nothing(store, open_store, root: Path) -> None:
    await drafted(store)
    other = await open_store("other")
    await take(other)
    names = {name for name in contents(root / "agents/agent") if "log" not in name}
    assert names == {"lease-2.json"}
    await store.aclose()


@pytest.mark.parametrize("step", ["_begin_epoch", "remove_owned"])
async def test_a_copier_that_dies_before_its_log_leaves_a_draft(
    store, open_store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await store.delete(KEY, (await take(store)).epoch)
    with monkeypatch.context() as patch:
        patch.setattr(acquire._Taking if step == "_begin_epoch" else documents, step, die)
        with pytest.raises(StoreUnavailableError):
            await take_after(store, KEY, after=2, draft=DRAFT)
    other = await open_store("other")
    assert await other.sessions() == []
    assert [info.epoch for info in await other.drafts("")] == [3]
    assert (await take(other)).head == 1


async def test_a_damaged_lease_shows_no_half_copy(store, open_store, root: Path) -> None:
    await drafted(store)
    path = root / "agents/agent/lease-1.json"
    lease = path.read_bytes()
    path.write_bytes(lease[:-9] + b"?" + lease[-8:])
    other = await open_store("other")
    for call in (other.holder(KEY), read(other), other.read_documents(KEY), other.head(KEY)):
        with pytest.raises(CorruptRecordError, match="was not finished"):
            await call
    assert await other.sessions() == []
    token = past_damage.set(True)
    with pytest.raises(CorruptRecordError):
        await read(other)
    past_damage.reset(token)


async def test_a_damaged_lease_hides_no_session_that_is_published(
    store, open_store, root: Path
) -> None:
    grant = await drafted(store)
    await store.publish(KEY, grant.epoch)
    path = root / "agents/agent/lease-1.json"
    path.write_bytes(path.read_bytes()[:-9] + b"?" + path.read_bytes()[-8:])
    other = await open_store("other")
    assert tuple(entries(await read(other))) == group("a", "b")


@pytest.mark.parametrize(
    ("begun", "format_"),
    [({}, 1), ({"first": 501}, 2), ({"draft": DRAFT}, 2)],
    ids=["plain", "elsewhere", "draft"],
)
async def test_releases_that_know_no_drafts_refuse_them(
    store, open_store, root: Path, begun: dict[str, object], format_: int
) -> None:
    grant = await take_after(store, KEY, after=0, **begun)
    await store.publish(KEY, grant.epoch)
    other = await open_store("other")
    for epoch in (1, 2):
        lease = msgspec.json.decode(
            open_sealed((root / f"agents/agent/lease-{epoch}.json").read_bytes()) or b""
        )
        assert lease["format"] == format_
        await take(other)
    rewrite_lease(root / "agents/agent/lease-3.json", format=3)
    with pytest.raises(UnsupportedVersionError):
        await other.holder(KEY)


async def test_past_damage_a_log_that_begins_elsewhere_is_read(store, root: Path) -> None:
    grant = await drafted(store)
    await store.publish(KEY, grant.epoch)
    token = past_damage.set(True)
    assert [record.seq for record in await read(store)] == [501, 502, 503]
    assert await store.head(KEY) == 503
    past_damage.reset(token)


async def test_what_an_overtaken_copier_folds_late_is_nobody_s(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had proven its lease, and its manifest comes after the next holder has cleaned up."""
    grant = await drafted(store)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 503, documents))
    late = root / "agents/agent/manifest-1.json"
    data, remove_owned = late.read_bytes(), leases.remove_owned

    def then_late(*args, **options):
        remove_owned(*args, **options)
        late.write_bytes(data)

    other = await open_store("other")
    with monkeypatch.context() as patch:
        patch.setattr(leases, "remove_owned", then_late)
        new = await take_after(other, KEY, after=1, first=7)
    assert (new.head, new.created) == (7, True)
    assert (await other.read_documents(KEY)).manifest is None
    await other.write_documents(KEY, documents, manifest_of(new, 7, documents))
    assert not late.exists()


async def test_an_acquire_whose_log_was_removed_beneath_it_was_overtaken(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not damaged: a faster process took the session, and deleted it."""
    await append_ok(store, await take(store), 2, *group("a"))
    other = await open_store("other")
    seal = acquire._Taking._seal

    def overtaken(mine, *args):
        monkeypatch.setattr(acquire._Taking, "_seal", seal)
        rival = acquire.acquire(store._root, KEY, Terms(me=store.owner, after=2), store._owners)
        leases.mark_deleted(mine._folder, KEY, rival[0].epoch, store._owners.me)
        return seal(mine, *args)

    monkeypatch.setattr(acquire._Taking, "_seal", overtaken)
    with pytest.raises(LeaseHeldError):
        await take_after(other, KEY, after=1)
    assert await read(other) == []


@pytest.mark.parametrize("method", ["holder", "read_documents", "read_log", "sessions"])
async def test_what_was_published_is_seen_at_each_step_of_its_takeover(
    store: FileStore, open_store, method: str
) -> None:
    """Its mark goes once a later lease says so, too."""
    other = await open_store("other")
    for step in itertools.count(1):
        key = SessionKey(f"at step {step:03d}")
        grant = await take_after(store, key, after=0, first=501, draft=DRAFT)
        head = await append_ok(store, grant, 502, *group("a", "b"))
        new = {"session.json": b"{}"}
        await store.write_documents(key, new, manifest_of(grant, head, new))
        await store.publish(key, grant.epoch)
        await store.release(key, grant.epoch)
        if method == "read_log":
            look = partial(read, other, key)
        elif method == "sessions":
            look = partial(other.sessions, SessionQuery(prefix=key.agent))
        else:
            look = partial(getattr(other, method), key)
        seen, _, is_amid = await amid(step, look, partial(take, store, key))
        match method:
            case "holder":
                assert seen.owner, step
                assert not seen.deleted, step
            case "read_documents":
                assert seen.found.keys() == new.keys(), step
            case "read_log":
                assert tuple(entries(seen)) == group("a", "b"), step
            case _:
                assert [info.key for info in seen] == [key], step
        if not is_amid:
            break
    assert step > 3
