"""Sessions that are moved more than once, or piecemeal, lose nothing on the way."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message, Retention
from perdure.errors import StoreError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE
from perdure.session.stored import followed
from perdure.store import PendingItem, take_after
from perdure.stores.delegate import ReadOnlyStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from perdure.transfer import migrate, read_bundle, write_bundle
from tests.pausing import PausingStore, meanwhile
from tests.references import fork_as_before, say_as_before

A, P = SessionKey("a"), SessionKey("p")


class Unfolded(MemoryStore):
    """A store that no fold gets into: as after kills."""

    async def write_documents(self, *_: Any) -> None:
        raise StoreUnavailableError("full")


class Held(MemoryStore):
    """A store in which somebody holds one session."""

    held: SessionKey | None = None

    async def acquire(self, key: SessionKey, *, after: int, **begun: Any) -> Any:
        if key == self.held:
            raise StoreError("held")
        return await take_after(super(), key, after=after, **begun)


async def opened(*stores: MemoryStore) -> None:
    for store in stores:
        await store.open()


async def says(store: MemoryStore, id: str, *texts: str) -> None:
    async with perdure.connect(store) as sessions, sessions.open(id) as session:
        for text in texts:
            session.append(Message.user(text))


async def keeps_one_of(store: MemoryStore, id: str, *texts: str) -> None:
    """Have a session of so many turns, and prune all but the last."""
    async with perdure.connect(store) as sessions:
        async with sessions.open(id) as session:
            for text in texts:
                async with session.turn():
                    session.append(Message.user(text))
        assert (await sessions.prune(Retention(keep_turns=1), id=id)).pruned


async def said(store: MemoryStore, id: str) -> tuple[list[str], list[str]]:
    """Return a session's context and its history."""
    async with perdure.connect(store) as sessions:
        view = await sessions.load(id)
        assert view is not None
        items = await view.history(limit=1000)
        told = [item.value.text for item in items if isinstance(item.value, Message)]
        return [message.text for message in view.context()], told


async def forked(store: MemoryStore) -> None:
    await says(store, "p", "one")
    async with perdure.connect(store) as sessions:
        await sessions.fork("p", "c")
    await says(store, "c", "two")


async def often_opened(store: MemoryStore) -> None:
    await says(store, "a", "first")
    for _ in range(20):
        await says(store, "a")
    await says(store, "a", "second")
    await store.open()


async def test_a_session_that_was_opened_often_comes_in_whole(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    await often_opened(source)
    await write_bundle(source, A, tmp_path / "a")
    await target.open()
    await read_bundle(target, tmp_path / "a")
    assert await said(target, "a") == (["first", "second"], ["first", "second"])


async def test_a_session_that_was_opened_often_is_migrated() -> None:
    source, target = MemoryStore(), MemoryStore()
    await often_opened(source)
    await target.open()
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == (["first", "second"], ["first", "second"])


async def test_a_fork_that_did_not_change_finds_its_parent_that_came_again() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), MemoryStore()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        session = await sessions.open("p")
        for n in range(3):  # under one lease: the target's copy is written again each time
            session.append(Message.user(str(n)))
            await session.save()
            await sessions.fork("p", f"c{n}")
            await opened(source, target)
            assert (await migrate(source, target)).failed == {}
            for fork in range(n + 1):
                texts = [str(k) for k in range(fork + 1)]
                assert await said(target, f"c{fork}") == (texts, texts)
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    await opened(source, target)
    last = await migrate(source, target)
    assert (last.failed, last.there, last.copied) == ({}, 4, 0)


async def test_what_comes_while_only_documents_are_new_is_not_skipped() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), PausingStore(MemoryStore())
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        session = await sessions.open("p")
        session.append(Message.user("one"))
        await session.save()
        for store in (source, target):
            await store.open()
        assert (await migrate(source, target)).failed == {}
        await sessions.rebuild_working_context("p")
        pause = target.pause("acquire")

        async def goes_on() -> None:
            session.append(Message.user("two"), Message.user("three"))
            await session.save()

        done = await meanwhile(pause, lambda: migrate(source, target), goes_on)
        assert (done.failed, done.copied) == ({}, 1)
    assert await said(target, "p") == (["one", "two", "three"],) * 2


@pytest.mark.parametrize("texts", [(), ("one",)], ids=["empty", "opened again"])
async def test_a_fork_of_a_session_that_was_only_opened_since_comes_over(
    texts: tuple[str, ...], tmp_path: Path
) -> None:
    source, target, third = MemoryStore(), MemoryStore(), MemoryStore()
    await says(source, "p", *texts)
    await says(source, "p")
    async with perdure.connect(source) as sessions:
        await sessions.fork("p", "c")
        assert (await sessions.fork("p", "c")).key == SessionKey("c")  # made before
    await says(source, "c", "two")
    await opened(source, target, third)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "c") == ([*texts, "two"],) * 2
    if texts:
        await write_bundle(source, P, tmp_path / "p")
        await read_bundle(third, tmp_path / "p")
    await write_bundle(source, SessionKey("c"), tmp_path / "c")
    await read_bundle(third, tmp_path / "c")
    assert await said(third, "c") == ([*texts, "two"],) * 2


async def test_a_deleted_session_that_is_posted_to_goes_behind_its_forks() -> None:
    source, target = MemoryStore(), MemoryStore()
    await forked(source)
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    async with perdure.connect(source) as sessions:
        await sessions.delete("p")
        await sessions.post("p", Message.user("posted"))
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert [info.key.agent for info in await target.sessions()] == ["c"]
    assert await target.sessions_with_pending_items() == [P]
    assert await said(target, "c") == (["one", "two"], ["one", "two"])


async def test_a_deleted_session_that_is_posted_to_goes_behind_its_deleted_fork() -> None:
    source, target = MemoryStore(), MemoryStore()
    await forked(source)
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    async with perdure.connect(source) as sessions:
        await sessions.delete("p")
        await sessions.delete("c")
        await sessions.post("p", Message.user("posted"))
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await target.sessions() == []
    assert await target.sessions_with_pending_items() == [P]


@pytest.mark.parametrize("there", [False, True])
async def test_what_comes_while_a_session_is_written_comes_with_the_next_run(there: bool) -> None:
    source, target = MemoryStore(), PausingStore(MemoryStore(backing=MemoryBacking()))
    await source.open()
    await target.open()
    await says(source, "a", "one")
    if there:
        await migrate(source, target)
        await says(source, "a", "two")
    pause = target.pause("write_documents")
    await meanwhile(pause, lambda: migrate(source, target), lambda: says(source, "a", "three"))
    assert (await migrate(source, target)).failed == {}
    async with perdure.connect(source) as ours, perdure.connect(target) as theirs:
        before, after = await ours.load("a"), await theirs.load("a")
        assert before is not None
        assert after is not None
        assert after.context() == before.context()


async def test_a_session_that_goes_while_it_comes_over_leaves_nothing() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), PausingStore(MemoryStore())
    await says(MemoryStore(backing=backing), "p", "one")
    for store in (source, target):
        await store.open()
    pause = target.pause("acquire")

    async def gone() -> None:
        async with perdure.connect(MemoryStore(backing=backing)) as sessions:
            await sessions.delete("p")
            await sessions.post("p", Message.user("posted"))

    await meanwhile(pause, lambda: migrate(source, target), gone)
    assert (await migrate(source, target)).failed == {}
    assert await target.sessions() == []
    assert await target.sessions_with_pending_items() == [P]


@pytest.mark.parametrize("is_used", [False, True])
async def test_a_session_that_began_anew_without_content_goes_from_the_target(
    is_used: bool,
) -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "first")
    await opened(source, target)
    assert (await migrate(source, target)).copied == 1
    if is_used:
        await says(target, "a", "second")
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
        await sessions.open("a")
    await opened(source, target)
    done = await migrate(source, target)
    if is_used:
        assert "has another session a" in done.failed["a"]
        assert await said(target, "a") == (["first", "second"], ["first", "second"])
    else:
        assert (done.failed, await target.sessions()) == ({}, [])
        await says(source, "a", "second")
        await opened(source, target)
        assert (await migrate(source, target)).failed == {}
        assert await said(target, "a") == (["second"], ["second"])


async def test_a_post_that_the_source_took_since_waits_no_more() -> None:
    source, target = Unfolded(), MemoryStore()
    await says(source, "p", "one")
    async with perdure.connect(source) as sessions:
        await sessions.post("p", Message.user("posted"))
    await opened(source, target)
    assert (await migrate(source, target)).posted == 1
    assert (
        await target.sessions_with_pending_items()
        == await source.sessions_with_pending_items()
        == [P]
    )
    await says(source, "p", "two")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await target.sessions_with_pending_items() == []
    await says(target, "p")
    assert await said(target, "p") == (["one", "posted", "two"], ["one", "posted", "two"])


async def test_a_post_that_was_left_in_the_target_waits_behind_a_session_that_came_again() -> None:
    source, target = MemoryStore(), MemoryStore()
    async with perdure.connect(source) as sessions:
        session = await sessions.open("p")
        session.append(Message.user("one"))
        await session.save()
        await target.open()
        assert (await migrate(source, target)).copied == 1
        assert (await migrate(source, target)).open == 1
        post = [PendingItem("op/0", MESSAGE, b'{"role":"user","content":"posted"}', 1.0)]
        await target.enqueue(P, post)
        session.append(Message.user("two"))  # under one lease all the while
        await session.save()
        assert (await migrate(ReadOnlyStore(source), target)).failed == {}
        assert await source.sessions_with_pending_items() == []
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    await says(target, "p")  # opened: it takes what waits
    assert await said(target, "p") == (["one", "two", "posted"], ["one", "two", "posted"])


async def test_a_bundle_holds_all_records_that_its_documents_were_made_of(tmp_path: Path) -> None:
    backing = MemoryBacking()
    await says(MemoryStore(backing=backing), "a", "one")

    class Beside(MemoryStore):
        """A store in which somebody goes on while it is read."""

        async def read_documents(self, key: SessionKey, names: Any = None) -> Any:
            await says(MemoryStore(backing=backing), "a", "more")
            return await super().read_documents(key, names)

    source, target = Beside(backing=backing), MemoryStore()
    await opened(source, target)
    await write_bundle(source, A, tmp_path / "a")
    await read_bundle(target, tmp_path / "a")
    context, history = await said(target, "a")
    assert context == history


# run again


async def lines(store: MemoryStore, key: SessionKey, path: Path) -> bytes:
    await write_bundle(store, key, path)
    return path.read_bytes()


async def test_a_second_run_goes_on_behind_what_the_first_has_brought(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    for number in range(3):
        await says(source, "a", f"turn {number}")
        await opened(source, target)
        done = await migrate(source, target)
        assert (done.failed, done.copied, done.continued) == ({}, number == 0, number > 0)
        ours, theirs = tmp_path / f"{number}-a", tmp_path / f"{number}-b"
        assert await lines(source, A, ours) == await lines(target, A, theirs)
    holder = await target.holder(A)
    assert holder is not None
    assert holder.epoch == 3  # one each run: nothing was removed
    assert (await migrate(source, target)).there == 1


async def test_a_session_that_is_held_all_the_while_comes_without_its_lease(
    tmp_path: Path,
) -> None:
    source, target = MemoryStore(), MemoryStore()
    async with perdure.connect(source) as sessions:
        session = await sessions.open("a")
        await target.open()
        for number in range(3):
            session.append(Message.user(f"turn {number}"))
            await session.save()
            done = await migrate(source, target)
            assert (done.failed, done.open) == ({}, 1)
            holder = await source.holder(A)
            assert holder is not None
            assert (holder.epoch, holder.owner) == (1, source.owner)
            ours, theirs = tmp_path / f"{number}-a", tmp_path / f"{number}-b"
            assert await lines(source, A, ours) == await lines(target, A, theirs)
    await opened(source)
    assert (await migrate(source, target)).open == 0


async def test_the_reason_against_a_diverged_session_names_the_record_and_a_cure_that_works() -> (
    None
):
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    assert (await migrate(source, target)).copied == 1
    await says(target, "a", "there")
    await says(source, "a", "here")
    await opened(source, target)
    why = (await migrate(source, target)).failed["a"]
    assert "has another session a: its record 4 is not in memory:" in why
    assert "perdure forget a --session default --store TARGET" in why
    assert await said(target, "a") == (["one", "there"], ["one", "there"])
    async with perdure.connect(target) as sessions:
        await sessions.forget(id="a", session="default")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == (["one", "here"], ["one", "here"])


async def test_what_the_source_deleted_is_deleted_in_the_target_too() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await says(source, "p", "one")
    await says(target, "own", "stays")
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
        await sessions.delete("p")
    await says(target, "p", "went on there")
    await opened(source, target)
    done = await migrate(source, target)
    assert (done.deleted, list(done.failed)) == (1, ["p"])
    assert "it was written there since" in done.failed["p"]
    assert [info.key.agent for info in await target.sessions()] == ["own", "p"]


async def test_a_post_to_what_the_source_deleted_waits_in_the_target_for_a_new_session() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
        await sessions.post("a", Message.user("anew"))
    await opened(source, target)
    done = await migrate(source, target)
    assert (done.failed, done.deleted, done.posted) == ({}, 1, 1)
    await says(target, "a", "two")
    assert await said(target, "a") == (["anew", "two"], ["anew", "two"])


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("then", ["nothing", "a new session", "a post"])
async def test_a_run_that_was_killed_between_its_lease_and_its_receipt_has_opened_nothing(
    copied: bool, then: str
) -> None:
    anew = then == "a new session"
    kills = 0
    while True:
        source, backing = MemoryStore(), MemoryBacking()
        await says(source, "a", "one")
        await says(source, "a", "two")
        await source.open()
        if copied:
            await run_ended(source, backing)
            await says(source, "a", "three")
            await says(source, "a", "four")
            await source.open()
        kills += 1
        broken = FaultyStore(
            MemoryStore(backing=backing), fail_on="put_blobs", nth=kills, how="crash", times=None
        )
        await broken.open()
        with contextlib.suppress(BaseExceptionGroup):
            await migrate(source, broken)
        await broken.aclose()  # its owner is dead
        if not broken.injected:
            break
        async with perdure.connect(source) as sessions:
            await sessions.delete("a")
            if then == "a post":
                await sessions.post("a", Message.user("waits"))
        if anew:
            await says(source, "a", "anew")
        await source.open()
        await run_ended(source, backing)
        target = MemoryStore(backing=backing)
        if anew:
            assert await said(target, "a") == (["anew"], ["anew"])
        else:
            await target.open()
            assert await target.sessions() == []
    assert kills > 2


async def run_ended(source: MemoryStore, backing: MemoryBacking) -> None:
    """Migrate into a target that nobody else has open."""
    target = MemoryStore(backing=backing)
    await target.open()
    assert (await migrate(source, target)).failed == {}
    await target.aclose()


async def test_what_its_holder_writes_before_it_lets_go_is_not_deleted_after_its_original() -> None:
    source, backing = MemoryStore(), MemoryBacking()
    await says(source, "a", "one")
    target = MemoryStore(backing=backing)
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
    await source.open()
    holder = MemoryStore(backing=backing)
    async with perdure.connect(holder, autosave=None) as sessions:
        session = await sessions.open("a")  # nothing was written yet
        session.append(Message.user("there"))
        why = (await migrate(source, target)).failed["a"]
    assert "memory: has deleted a, and memory: has it: it was written there since" in why
    assert await said(target, "a") == (["one", "there"], ["one", "there"])


async def test_a_session_that_was_deleted_and_begun_anew_replaces_its_copy() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one", "two")
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
    await says(source, "a", "anew")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == (["anew"], ["anew"])


async def test_a_session_that_was_renamed_there_and_back_replaces_its_copy() -> None:
    """It keeps its time of creation, by which alone it would be taken for the one that was here."""
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    await says(source, "a", "one")
    assert (await migrate(source, target)).copied == 1
    async with perdure.connect(source) as sessions:
        await sessions.rename("a", "b")
        await sessions.rename("b", "a")
    await says(source, "a", "two")
    for _ in range(2):
        assert not (await migrate(source, target)).failed
    assert await said(target, "a") == (["one", "two"], ["one", "two"])


async def test_a_source_that_has_lost_records_takes_none_from_the_target() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), MemoryStore()
    await says(source, "a", "one")
    await opened(source)
    lagging = copy.deepcopy(backing.sessions[A])
    await says(source, "a", "two")
    await opened(source, target)
    await migrate(source, target)
    backing.sessions[A] = lagging  # a standby that had not heard of it
    why = (await migrate(source, target)).failed["a"]
    assert "has another session a" in why
    assert await said(target, "a") == (["one", "two"], ["one", "two"])


async def test_pruned_history_is_pruned_in_the_target_too() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "first")
    await opened(source, target)
    await migrate(source, target)
    await keeps_one_of(source, "a", "one", "two", "three")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == await said(source, "a")
    assert (await said(target, "a"))[1] == ["three"]


async def test_only_its_newest_record_is_read_of_a_session_that_has_not_changed() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    await migrate(source, target)
    counting = FaultyStore(source, nth=10_000)
    await counting.open()
    assert (await migrate(counting, target)).there == 1
    assert counting.calls["head"] > 0
    assert counting.calls["read_log"] == 1


async def test_a_source_that_went_back_and_on_to_the_same_head_is_not_taken_for_equal() -> None:
    backing, target = MemoryBacking(), MemoryStore()
    source = Unfolded(backing=backing)
    await says(source, "a", "one")
    lagging = copy.deepcopy(backing.sessions[A])
    await says(source, "a", "lost")
    await opened(source, target)
    assert (await migrate(source, target)).copied == 1
    assert (await migrate(source, target)).there == 1
    backing.sessions[A] = lagging
    await says(source, "a", "new")
    await opened(source)
    assert "has another session a" in (await migrate(source, target)).failed["a"]
    assert await said(target, "a") == (["one", "lost"], ["one", "lost"])


# what the target's own programs do


async def test_what_is_written_under_a_lease_from_before_both_were_equal_is_not_deleted() -> None:
    source, backing = MemoryStore(), MemoryBacking()
    await says(source, "a", "one")
    target = MemoryStore(backing=backing)
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        session = await sessions.open("a")
        assert (await migrate(source, target)).failed == {}  # both are equal, and one is held
        session.append(Message.user("there"))
        await session.save()
        async with perdure.connect(source) as originals:
            await originals.delete("a")
        await source.open()
        why = (await migrate(source, target)).failed["a"]
    assert "it was written there since" in why
    assert await said(target, "a") == (["one", "there"], ["one", "there"])


async def test_what_was_only_opened_in_the_target_goes_with_its_original() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    await migrate(source, target)
    await says(target, "a")
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
    await opened(source, target)
    done = await migrate(source, target)
    assert (done.failed, done.deleted, await target.sessions()) == ({}, 1, [])


async def test_a_session_that_was_only_opened_in_the_target_takes_one_that_was_pruned() -> None:
    source, target = MemoryStore(), MemoryStore()
    await keeps_one_of(source, "a", "one", "two", "three")
    await says(target, "a")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == await said(source, "a")


@pytest.mark.parametrize("scheme", ["encrypted+file", "file"])
async def test_sessions_are_compared_where_nothing_says_that_they_are_equal(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    source = MemoryStore()
    await says(source, "a", "one")
    await forked(source)
    target = perdure.store_for(f"{scheme}:{tmp_path / 'target'}")
    await source.open()
    await target.open()
    assert (await migrate(source, target)).copied == 3
    await target.remove_blobs("", await target.blob_names(""))
    done = await migrate(source, target)
    assert (done.failed, done.there, done.continued) == ({}, 3, 0)
    await target.aclose()


async def test_damaged_documents_of_a_copy_are_written_again() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(), MemoryStore(backing=backing)
    await says(source, "a", "one")
    await opened(source, target)
    assert (await migrate(source, target)).copied == 1
    await target.remove_blobs("", await target.blob_names(""))
    documents = backing.sessions[A].documents
    documents["session.json"] = b"?"
    assert (await migrate(source, target)).failed == {}
    assert (await target.read_documents(A)).damaged == ()


async def test_what_was_folded_in_the_target_since_is_not_deleted_after_its_original() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    await migrate(source, target)
    async with perdure.connect(target) as sessions:
        await sessions.rebuild_working_context("a")
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
    await opened(source, target)
    assert "it was written there since" in (await migrate(source, target)).failed["a"]
    assert await said(target, "a") == (["one"], ["one"])


async def test_a_session_of_the_targets_own_is_left_alone_by_one_of_which_the_same_is_pruned() -> (
    None
):
    source, target = MemoryStore(), MemoryStore()
    await keeps_one_of(source, "a", "one", "two", "three")
    await says(target, "a", "own")
    await opened(source, target)
    why = (await migrate(source, target)).failed["a"]
    assert "has another session a: its record 2 is not in memory:" in why
    assert await said(target, "a") == (["own"], ["own"])


async def test_a_copy_of_which_all_is_pruned_is_written_again_under_the_same_lease() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), MemoryStore()
    await opened(source, target)
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("first"))
        await session.save()
        assert (await migrate(source, target)).copied == 1
        for number in range(3):
            async with session.turn():
                session.append(Message.user(f"turn {number}"))
        await session.aclose()
        assert (await sessions.prune(Retention(keep_turns=1), id="a")).pruned
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == await said(MemoryStore(backing=backing), "a")


# posts


@pytest.mark.parametrize("then", ["taken", "deleted"])
async def test_a_post_that_came_from_the_source_does_not_go_back(then: str) -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "p", "one", "two")
    async with perdure.connect(source) as sessions:
        await sessions.post("p", Message.user("posted"))
    await opened(source, target)
    assert (await migrate(source, target)).posted == 1
    if then == "taken":
        await keeps_one_of(source, "p", "three", "four", "five")
    else:
        async with perdure.connect(source) as sessions:
            await sessions.delete("p")
    await opened(source, target)
    done = await migrate(source, target)
    assert (done.failed, done.copied, done.deleted) == ({}, then == "taken", then == "deleted")
    assert await source.sessions_with_pending_items() == []
    assert await target.sessions_with_pending_items() == []


async def test_a_program_that_takes_a_post_while_it_is_read_is_in_nobodys_way() -> None:
    backing = MemoryBacking()
    source, target = PausingStore(MemoryStore(backing=backing)), MemoryStore()
    await says(MemoryStore(backing=backing), "p", "one")
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        await sessions.post("p", Message.user("posted"))
    for store in (source, target):
        await store.open()
    pause = source.pause("receive")

    async def takes() -> None:
        await says(MemoryStore(backing=backing), "p", "two")

    done = await meanwhile(pause, lambda: migrate(source, target), takes)
    assert (done.failed, done.posted) == ({}, 0)


# what is damaged, or of an earlier release


async def test_blobs_that_the_target_has_lost_are_put_back() -> None:
    class Lossy(MemoryStore):
        """A store that says that it has blobs which it has not."""

        async def renew(self, tenant: str, names: Any) -> set[str]:
            return set()

    source, target = MemoryStore(), Lossy()
    async with perdure.connect(source) as sessions, sessions.open("a") as session:
        session.memory.set("large", "v" * 20_000)
    await opened(source, target)
    names = set(await source.blob_names(""))
    assert names
    for run in range(2):
        assert (await migrate(source, target)).failed == {}
        assert names < set(await target.blob_names(""))
        if not run:
            await target.remove_blobs("", await target.blob_names(""))


async def test_damaged_documents_of_the_source_are_not_taken_for_the_sessions() -> None:
    backing = MemoryBacking()
    source, target = MemoryStore(backing=backing), MemoryStore()
    await says(source, "a", "one")
    backing.sessions[A].documents["session.json"] = b"?"
    await opened(source, target)
    why = (await migrate(source, target)).failed["a"]
    assert "session.json of a is damaged: `perdure rebuild` makes it again" in why
    assert await target.sessions() == []


async def test_a_copy_that_an_earlier_release_made_of_a_fork_becomes_plain() -> None:
    backing, there = MemoryBacking(), MemoryBacking()
    source, target = MemoryStore(backing=backing), MemoryStore(backing=there)
    await says(source, "p", "one")
    await opened(source, target)
    await fork_as_before(source, "p", "c")
    await say_as_before(source, "c", "two")
    there.sessions.update(copy.deepcopy(backing.sessions))
    assert (await migrate(source, target)).failed == {}
    base = await followed(target).base_of(SessionKey("c"))
    assert base is None
    assert await said(target, "c") == (["one", "two"],) * 2


async def test_what_a_fork_of_an_earlier_release_reads_is_not_written_again() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "p", "one")
    await opened(source, target)
    await migrate(source, target)
    await fork_as_before(target, "p", "c")
    await keeps_one_of(source, "p", "two", "three", "four")
    await source.open()
    assert "is read by c" in (await migrate(source, target)).failed["p"]
    assert await said(target, "c") == (["one"],) * 2


async def test_a_deletion_that_is_followed_writes_nothing_to_the_source() -> None:
    source, target = MemoryStore(), MemoryStore()
    await says(source, "a", "one")
    await opened(source, target)
    await migrate(source, target)
    await target.enqueue(A, [PendingItem("op/0", MESSAGE, b'{"role":"user","content":"x"}', 1.0)])
    async with perdure.connect(source) as sessions:
        await sessions.delete("a")
    await opened(source)
    done = await migrate(source, target)
    assert (done.failed, done.deleted) == ({}, 1)
    assert await source.sessions_with_pending_items() == []


async def test_no_store_brings_the_keys_of_another() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    await take_after(source, SessionKey("perdure:keyring"), after=0)
    assert list((await migrate(source, target)).failed) == ["perdure:keyring"]
    assert await target.holder(SessionKey("perdure:keyring")) is None
