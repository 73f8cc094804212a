"""The file store's inbox on the disk: what lies where, and what damage does."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path

import anyio
import pytest

from perdure.records.keys import SessionKey
from perdure.store import DeadLetter
from perdure.stores.file import FileStore, leases
from perdure.testing.conformance._kit import KEY, take
from perdure.testing.conformance.inbox import posted, waiting
from tests.stores.file.kit import amid, rewrite_lease

pytestmark = pytest.mark.anyio


def box_of(root: Path, life: int = 1) -> Path:
    return root / "agents" / "agent" / f"inbox-{life}"


async def test_a_post_is_one_readable_file(store: FileStore, root: Path) -> None:
    await store.enqueue(KEY, posted("a", "b"))
    (file,) = box_of(root).iterdir()
    assert file.name.startswith("000000000001-")
    assert b'"op_id":"a","kind":"message","payload":{"text":"a"}' in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_post_lasts_in_folders_that_a_killed_poster_made(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry that leads to it is synced by whoever says that it is durable."""
    box_of(root).mkdir(parents=True)  # and never synced
    synced: list[int] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    await store.enqueue(KEY, posted("a"))
    path = box_of(root)
    (post,) = path.iterdir()
    assert {one.stat().st_ino for one in (post, path, *path.parents[:3])} <= set(synced)


async def test_an_inbox_that_is_empty_takes_no_room(store: FileStore, root: Path) -> None:
    grant = await take(store)
    await store.enqueue(KEY, posted(*map(str, range(20))))
    await store.ack(KEY, grant.epoch, [str(n) for n in range(19)])
    assert len(list(box_of(root).iterdir())) == 1
    await store.ack(KEY, grant.epoch, ["19"])
    assert list(box_of(root).iterdir()) == []


async def test_a_damaged_post_says_so_and_hinders_none(store: FileStore, root: Path) -> None:
    grant = await take(store)
    await store.enqueue(KEY, posted("a"))
    await store.enqueue(KEY, posted("b"))
    first = min(box_of(root).iterdir())
    data = first.read_bytes()
    first.write_bytes(data.replace(b'"text":"a"', b'"text":"x"'))
    torn = first.read_bytes()
    bad, good = await store.receive(KEY, grant.epoch)
    assert (bad.payload, good.op_id, good.damage) == (torn, "b", "")
    assert first.name in bad.damage
    await store.ack(KEY, grant.epoch, dead=[DeadLetter(bad, bad.damage, 5, 1.0)])
    assert await waiting(store, grant.epoch) == ["b"]
    assert (await store.dead_letters(KEY))[0].item.payload == torn
    (kept,) = (root / "agents" / "agent" / "dead-letters-1").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"tries", b"trIes"))
    (lost,) = await store.dead_letters(KEY)
    assert lost.item.payload == kept.read_bytes()
    assert "checksum" in lost.item.damage
    await store.ack(KEY, None, [lost.item.op_id])
    assert list(kept.parent.iterdir()) == []


async def test_a_session_of_a_newer_release_hides_no_other_that_waits(
    store: FileStore, root: Path
) -> None:
    other = SessionKey("other")
    for key in (KEY, other):
        await take(store, key)
        await store.enqueue(key, posted("a"))
    rewrite_lease(root / "agents/agent/lease-1.json", format=999)
    assert await store.sessions_with_pending_items() == [other]


async def test_what_is_no_post_is_left_alone(store: FileStore, root: Path) -> None:
    grant = await take(store)
    await store.enqueue(KEY, posted("a"))
    (box_of(root) / "note.txt").write_text("mine")
    (box_of(root) / ".x.tmp").write_text("half")
    assert await waiting(store, grant.epoch) == ["a"]
    assert (box_of(root) / "note.txt").read_text() == "mine"


async def test_a_new_life_has_a_new_inbox(store: FileStore, root: Path) -> None:
    grant = await take(store)
    await store.enqueue(KEY, posted("a"))
    await store.delete(KEY, grant.epoch)
    assert not box_of(root).exists()
    box_of(root).mkdir()  # a post that overslept the deletion
    (box_of(root) / "000000000001-many.json").write_bytes(b"")
    await store.enqueue(KEY, posted("b"))
    again = await take(store)
    assert await waiting(store, again.epoch) == ["b"]
    assert box_of(root, again.epoch).exists()
    assert not box_of(root).exists()


async def test_a_document_of_that_name_is_no_inbox(store: FileStore, root: Path) -> None:
    from perdure.stores.file.layout import document_path

    assert document_path("inbox-1/x.json")[0] != "inbox-1"


# where nobody tells


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "watch_folder", lambda _: None)


@pytest.mark.usefixtures("untold")
async def test_news_are_looked_for_where_nobody_tells(root: Path) -> None:
    one, other = FileStore(root, owner="one"), FileStore(root, owner="other")
    await one.open()
    await other.open()
    await take(one)
    heard: list[SessionKey] = []

    async def listen() -> None:
        while not heard:
            await one.wait_for_notification(20)
            heard.extend((await one.heartbeat()).mail)

    with anyio.fail_after(60):  # less than one listens
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            await other.enqueue(KEY, posted("a"))
    assert heard == [KEY]
    await one.wait_for_notification(0.05)
    await one.aclose()
    await other.aclose()


@pytest.mark.parametrize("told", [True, False])
async def test_news_come_before_their_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    if not told:
        monkeypatch.setattr(leases, "watch_folder", lambda _: None)
    one, other = FileStore(root, owner="one"), FileStore(root, owner="other")
    await one.open()
    await other.open()
    await take(one)
    holder = await other.holder(KEY)
    assert holder is not None
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.wait_for_notification, 1000)
            tasks.start_soon(one.wait_for_notification, 1000)  # two who wait are both told
            await anyio.sleep(0.05)
            await other.request_handover(KEY, holder)
    assert (await one.heartbeat()).handovers == (KEY,)
    await one.aclose()
    await other.aclose()


async def test_closing_wakes_whoever_waits_for_news(root: Path) -> None:
    store = FileStore(root)
    await store.open()
    woken: list[str] = []

    async def wait() -> None:
        await store.wait_for_notification(1000)
        woken.append("one who waited")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.05)
            assert woken == []
            await store.aclose()
    assert woken == ["one who waited"]


@pytest.mark.parametrize("halted", ["poster", "taker"])
async def test_what_is_posted_after_a_deletion_is_the_next_lifes_at_each_step_of_its_beginning(
    store: FileStore, open_store, halted: str
) -> None:
    other = await open_store("other")
    for step in itertools.count(1):
        key = SessionKey(f"at step {step:03d}")
        await store.delete(key, (await take(store, key)).epoch)
        post, begin = partial(store.enqueue, key, posted("a")), partial(take, other, key)
        if halted == "poster":
            new, grant, is_amid = await amid(step, post, begin)
        else:
            grant, new, is_amid = await amid(step, begin, post)
        assert new == 1
        assert await waiting(other, grant.epoch, key) == ["a"], step
        is_heard = key in (await other.heartbeat()).mail
        if not is_amid:
            break
        if halted == "poster":  # it may have been there before anybody could be told
            assert is_heard or grant.found.may_have_items, step
    assert step > 10
