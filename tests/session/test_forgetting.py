"""Deleting and forgetting: nothing is left of it, and nothing else is lost."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from perdure import (
    ConfigError,
    LeaseHeldError,
    LeaseLostError,
    Message,
    PerdureError,
    SessionError,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.records.messages import EncodedRecord
from perdure.session import spill as spilling
from perdure.session.delete import RetainedItem
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from perdure.store import Beginning, Draft, Terms, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.pausing import PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Connect, Place
from tests.session.lives import converse, looks, said, told

QUIET = Shutdown(signals=False)
CANARY = "c4n4ry"


async def view(sessions: SessionManager, id: str, **where: str) -> object:
    found = await sessions.load(id, **where)
    assert found is not None
    return found


async def ids(sessions: SessionManager) -> list[str]:
    return [info.key.agent for info in await sessions.list()]


# deleting the parent of forks


async def test_forks_keep_what_they_reach_of_a_deleted_parent(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one", "two")
        await sessions.fork("parent", "closed")
        await sessions.fork("parent", "at one", at="turn one")
        await sessions.fork("parent", "held open")
        await converse(sessions, "closed", "mine")
        held = await sessions.open("held open")
        before = {id: await looks(await view(sessions, id)) for id in ("closed", "at one")}
        before["held open"] = await looks(held)
        await converse(sessions, "parent", "theirs alone")
        assert await sessions.delete("parent")
        assert await ids(sessions) == ["at one", "closed", "held open"]
        for id, look in before.items():
            assert await looks(await view(sessions, id)) == look
        held.append(Message.user("on"))
        assert [text for _, text in await told(held)][-1] == "on"
        before["held open"] = await looks(held)
    async with again() as sessions:
        for id, look in before.items():
            async with sessions.open(id) as session:
                assert await looks(session) == look
        with pytest.raises(SessionNotFoundError):
            await sessions.open("parent", create=False)


async def test_a_chain_of_forks_loses_its_middle_and_its_beginning(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        await sessions.fork("a", "b")
        await converse(sessions, "b", "two")
        await sessions.fork("b", "c")
        await converse(sessions, "c", "three")
        await sessions.fork("c", "d", at="turn one")
        c = await looks(await view(sessions, "c"))
        d = await looks(await view(sessions, "d"))
        for gone in ("b", "a"):
            assert await sessions.delete(gone)
            assert await looks(await view(sessions, "c")) == c
            assert await looks(await view(sessions, "d")) == d
        assert await sessions.delete("c")
        assert await looks(await view(sessions, "d")) == d
    async with again() as sessions:
        await sessions.fork("d", "e")
        async with sessions.open("e") as session:
            assert await looks(session) == d


async def test_a_new_life_under_the_name_of_a_deleted_parent_is_not_the_forks(
    again: Connect,
) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one")
        await sessions.fork("parent", "child")
        await sessions.delete("parent")
        await converse(sessions, "parent", "another life")
        assert said(await view(sessions, "child")) == ["one", "re one"]
        assert await sessions.delete("parent")
        assert said(await view(sessions, "child")) == ["one", "re one"]


# forgetting


def blob_of(text: str) -> tuple[str, bytes]:
    data = text.encode()
    return hashlib.sha256(data).hexdigest(), data


async def refer(sessions: SessionManager, id: str, *names: str) -> None:
    async with sessions.open(id) as session:
        for name in names:
            session.append(EncodedRecord("app:blob", msgspec.json.encode({"blob": name})))
        await session.save()


def holding(place: Path, text: str) -> list[str]:
    return [
        str(path.relative_to(place))
        for path in place.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


async def test_nothing_of_a_forgotten_session_is_left(tmp_path: Path) -> None:
    place, spill = tmp_path / "data", tmp_path / "spill"
    stopping = Shutdown(signals=False, spill=str(spill))
    key = SessionKey("gone")
    async with connect(place, shutdown=stopping) as sessions:
        await converse(sessions, "kept", "one")
        await converse(sessions, "gone", f"{CANARY} one", "two", owner="ada", tags=[CANARY])
        name, data = blob_of(f"{CANARY} blob")
        await sessions._store.put_blobs("", {name: data})
        await refer(sessions, "gone", name)
        await sessions.post("gone", Message.user(f"{CANARY} posted"))
        await sessions.fork("kept", "child")
    folder = place / "agents" / "gone"
    (folder / "memory.json").write_text(f"damaged {CANARY}")
    async with connect(place, shutdown=stopping) as sessions:
        async with sessions.open("gone") as session:
            await session.memory.keys()
        assert (folder / "quarantine").is_dir()
        header = spilling.SpillHeader(spilling.FORMAT, key, epoch=9, base=3)
        entry = EncodedRecord("x", b'"' + CANARY.encode() + b'"').entry
        spilling.write(str(spill), header, [entry])
        before = holding(tmp_path, CANARY)
        assert len(before) >= 5
        dry = await sessions.forget(id="gone", dry_run=True)
        assert sorted(holding(tmp_path, CANARY)) == sorted(before)
        report = await sessions.forget(id="gone")
        assert holding(tmp_path, CANARY) == []
        assert (report.sessions, report.blobs, report.spill_files) == ((key,), 1, 1)
        assert (dry.sessions, dry.blobs, dry.spill_files, dry.dry_run) == ((key,), 1, 1, True)
        assert report.bytes > len(data)
        assert report.records > 10
        assert str(place) in report.places
        assert report.kept == ()
        assert said(await view(sessions, "child")) == ["one", "re one"]
        assert (await sessions.forget(id="gone")).sessions == ()


async def test_nothing_of_a_forgotten_session_is_left_in_memory() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await converse(sessions, "gone", CANARY)
        name, data = blob_of(CANARY)
        await sessions._store.put_blobs("", {name: data})
        await refer(sessions, "gone", name)
        await sessions.forget(id="gone")
    left = [entry for session in backing.sessions.values() for entry in session.entries]
    assert left == []
    assert all(session.documents == {} for session in backing.sessions.values())
    assert not any(backing.blobs.values())


async def test_what_others_reach_stays_and_is_named(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "gone", "one", f"{CANARY} two")
        shared, own = blob_of("shared"), blob_of("own")
        await sessions._store.put_blobs("", dict([shared, own]))
        await sessions._store.put_blobs("other", dict([own]))
        await refer(sessions, "gone", shared[0], own[0])
        await refer(sessions, "kept", shared[0])
        await sessions.fork("gone", "fork", at="turn one")
        before = await looks(await view(sessions, "fork"))
        report = await sessions.forget(id="gone")
        assert await looks(await view(sessions, "fork")) == before
        assert await sessions._store.get_blob("", own[0]) is None
        assert await sessions._store.get_blob("", shared[0]) == shared[1]
        assert await sessions._store.get_blob("other", own[0]) == own[1]
        kept = {(one.what, str(one.by)) for one in report.kept}
        assert kept == {("blob", "kept")}
        assert {str(one.of) for one in report.kept} == {"gone"}


async def test_forks_that_are_forgotten_too_keep_nothing(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a parent", "one", owner="ada")
        await sessions.fork("a parent", "child")
        await sessions.fork("child", "grandchild")
        await sessions.fork("a parent", "z copied")
        await sessions.copy("a parent", "copied")
        report = await sessions.forget(owner="ada")
        assert len(report.sessions) == 5
        assert report.kept == ()
        assert await ids(sessions) == []
        assert await sessions._store.blob_names("") == []


async def test_owner_and_tag_are_as_of_now(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "folded", "one", owner="ada", tags=["x"])
        lagging = await sessions.open("lagging", owner="ada")
        await lagging.save()
        async with sessions.open("was hers", owner="ada") as session:
            await session.aclose()
        given = await sessions.open("was hers")
        given.describe(owner="bob")
        await given.save()
        await converse(sessions, "other", "two", owner="bob")
        found = await sessions.forget(owner="ada", dry_run=True)
        assert [str(key) for key in found.sessions] == ["folded", "lagging"]
        assert [str(k) for k in (await sessions.forget(tag="x")).sessions] == ["folded"]
        assert [str(k) for k in (await sessions.forget(owner="ada")).sessions] == ["lagging"]
        assert await ids(sessions) == ["other", "was hers"]


async def test_opening_does_not_take_a_session_from_its_owner(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "hers", "one", owner="ada")
        await converse(sessions, "nobody's", "two")
    async with again() as sessions:
        refused = "hers belongs to 'ada', not to 'mallory'"
        with pytest.raises(SessionError, match=refused):
            await sessions.open("hers", owner="mallory")
        assert sessions.health().sessions == 0
        async with sessions.open("hers") as opened:  # nothing is held; the label stays
            with pytest.raises(SessionError, match=refused):
                await sessions.open("hers", owner="mallory", autosave=None, tags=["taken"])
            assert (opened.info.metadata.owner, opened.info.metadata.tags) == ("ada", ())
            assert opened._tracked.options is not None
            opened.append(Message.user("more"))
        async with sessions.open("hers", owner="ada"):
            pass
        async with sessions.open("nobody's", owner="ada"):
            pass
        with pytest.raises(SessionError) as caught:
            await sessions.open("hers", owner="m" * 1000)
        assert len(str(caught.value)) < 500
    async with again() as sessions:
        found = await sessions.forget(owner="ada")
        assert [str(key) for key in found.sessions] == ["hers", "nobody's"]
        assert (await sessions.forget(owner="mallory")).sessions == ()


async def test_a_session_is_given_to_another_owner_by_describe(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("a", owner="ada") as session:
            session.describe(owner="bob")
        async with sessions.open("a", owner="bob"):
            pass
        found = await sessions.forget(owner="bob", dry_run=True)
        assert [str(key) for key in found.sessions] == ["a"]


async def test_conversations_and_tenants_are_apart(again: Connect) -> None:
    async with again() as sessions:
        for session in ("one", "two"):
            await converse(sessions, "a", session, session=session)
        await converse(sessions, "a", "theirs", tenant="t")
        await converse(sessions, "ab", "prefix")
        assert len((await sessions.forget(id="a", session="one")).sessions) == 1
        assert said(await view(sessions, "a", session="two")) == ["two", "re two"]
        assert len((await sessions.forget(id="a")).sessions) == 1
        assert said(await view(sessions, "a", tenant="t")) == ["theirs", "re theirs"]
        assert await ids(sessions) == ["ab"]
        with pytest.raises(ConfigError, match="give an id, an owner or a tag"):
            await sessions.forget()


async def test_what_another_process_holds_on_to_is_not_half_forgotten() -> None:
    backing = MemoryBacking()
    one = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    await converse(one, "a", "one", owner="ada")
    await converse(one, "b", "two", owner="ada")
    await two.open("b")
    with pytest.raises(LeaseHeldError):
        await one.forget(owner="ada", on_held="raise")
    assert said(await view(one, "a")) == ["one", "re one"]
    assert len((await one.forget(owner="ada")).sessions) == 2
    await two.aclose()
    await one.aclose()


async def test_a_forget_that_is_refused_closes_nothing_that_is_open_here(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as one, connect(place(), shutdown=QUIET) as two:
        mine = await one.open("a", owner="ada")
        await converse(two, "b", "theirs", owner="ada")
        await two.open("b")
        with pytest.raises(LeaseHeldError):
            await one.forget(owner="ada", on_held="raise")
        mine.append(Message.user("on"))
        await mine.save()
        assert said(await view(two, "a")) == ["on"]
        assert len((await one.forget(owner="ada")).sessions) == 2


# what is said about a session


async def test_title_owner_and_tags_can_be_changed_and_listed(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", owner="ada", tags=["x"])
        await converse(sessions, "b", "two", owner="bob", tags=["x", "y"])
        async with sessions.open("a") as session:
            session.describe(title="renamed", owner="bob", tags=["z"])
            await session.aclose()
        infos = {info.key.agent: info for info in await sessions.list()}
        assert (infos["a"].title, infos["a"].owner, infos["a"].tags) == ("renamed", "bob", ("z",))
        listed = [info.key.agent for info in await sessions.list(owner="bob")]
        assert listed == ["a", "b"]
        assert [info.key.agent for info in await sessions.list(tag="x")] == ["b"]
        assert [info.key.agent for info in await sessions.list(owner="bob", tag="z")] == ["a"]
        assert await sessions.list(owner="ada") == []


async def test_posts_to_a_session_that_nobody_has_opened_are_forgotten(again: Connect) -> None:
    """Forgetting leaves nothing that is known of an id."""
    async with again() as sessions:
        for session in ("default", "second"):
            await sessions.post("ada", Message.user("secret"), key="op-1", session=session)
        await sessions.post("bob", Message.user("stays"), key="op-1")
        wanted = (SessionKey("ada"), SessionKey("ada", "second"))
        assert (await sessions.forget(id="ada", dry_run=True)).sessions == wanted
        assert (await sessions.forget(id="ada")).sessions == wanted
        assert (await sessions.forget(id="ada")).sessions == ()
        assert not await sessions.exists("ada")
        async with sessions.open("ada") as ada, sessions.open("bob") as bob:
            assert ada.context() == []
            assert [message.text for message in bob.context()] == ["stays"]


async def test_a_session_is_forgotten_by_its_id_alone(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("forget me"))
            await session.save()
        report = await sessions.forget("ada")
        assert list(map(str, report.sessions)) == ["ada"]
        assert not await sessions.exists("ada")


async def test_a_value_that_another_sessions_next_fold_names_is_kept(again: Connect) -> None:
    async with again(limits=Limits(fold_ratio=float("inf"))) as sessions:
        session = await sessions.open("a")
        session.memory.set("large", "v" * 20_000)
        await session.save()  # the value is in the log alone
        await sessions.copy("a", "copy")
        await sessions.rebuild_working_context("copy")  # which makes a blob of it
        report = await sessions.forget(id="copy")
        [why] = [one.why for one in report.kept if one.what == "blob"]
        assert why.split()[-1] in await sessions._store.blob_names("")


async def test_what_is_deleted_and_posted_to_while_it_is_chosen_is_forgotten_once(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        pause = store.pause("sessions_with_pending_items")

        async def gone() -> None:
            await sessions.delete("a")
            await sessions.post("a", Message.user("posted"))

        report = await meanwhile(pause, lambda: sessions.forget("a"), gone)
        assert [str(key) for key in report.sessions] == ["a"]
        async with sessions.open("a") as session:
            assert said(session) == []


# forgetting beside sessions that begin to name the same blob


async def share(sessions: SessionManager, *ids: str) -> str:
    """Have sessions name one blob; return its name."""
    name, data = blob_of(f"shared by {' '.join(ids)}")
    await sessions._store.put_blobs("", {name: data})
    for id in ids:
        await refer(sessions, id, name)
    return name


async def require_blob(sessions: SessionManager, id: str, name: str) -> None:
    """Require that what a session names is there, if there is such a session."""
    if await sessions.exists(id):
        assert await sessions._store.get_blob("", name) is not None, id


async def test_the_blob_of_a_fork_that_is_just_published_outlives_all_others_that_named_it(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        name = await share(second, "a", "b")
        pause, kept = store.pause("publish"), list[RetainedItem]()

        async def forget() -> None:
            await second.delete("b")
            kept.extend((await second.forget("a", wait=0.0)).kept)

        await meanwhile(pause, lambda: first.fork("b", "new"), forget)
        await require_blob(second, "new", name)
        assert [(str(item.of), str(item.by)) for item in kept] == [("a", "new")]
        assert "is just being made" in kept[0].why
        await second.forget("new")
        assert await second._store.get_blob("", name) is None


async def test_what_is_named_after_others_were_looked_at_is_not_removed(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        name = await share(second, "a")
        data = await second._store.get_blob("", name)
        assert data is not None
        await converse(second, "z", "the last that is looked at")
        pause = store.pause("read_log", lambda key: key == SessionKey("z"), after=True)
        report = await meanwhile(
            pause,
            lambda: first.forget("a"),
            lambda: put_and_name(second, "", "new", data),
        )
        await require_blob(second, "new", name)
        assert [item.by for item in report.kept] == [None]


async def test_who_has_lost_a_session_removes_no_blob_of_it(place: Place) -> None:
    store, other, key = PausingStore(place()), place(), SessionKey("a")
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        name = await share(second, "a")
        await converse(second, "z", "the last that is looked at")

        async def take_over() -> None:
            await other.open()
            holder = await other.holder(key)
            assert holder is not None
            await take_after(other, key, after=holder.epoch)
            await other.aclose()

        async def forget() -> None:
            with pytest.raises(LeaseLostError):
                await first.forget("a")

        pause = store.pause("read_log", lambda key: key == SessionKey("z"), after=True)
        await meanwhile(pause, forget, take_over)
        await second._store.sweep("", (), 0.0, among={name})  # removes what is still set aside
        await require_blob(second, "a", name)


async def test_a_copy_that_was_left_unfinished_keeps_nothing_that_is_forgotten(
    place: Place,
) -> None:
    store = place()
    async with connect(place(), shutdown=QUIET) as sessions:
        name = await share(sessions, "a")
        await store.open()
        draft = Draft(source=SessionKey("b"), generation=1, up_to=2, purpose="fork")
        grant = await take_after(store, SessionKey("new"), after=0, draft=draft)
        await store.release(grant.key, grant.epoch)
        assert (await sessions.forget("a", wait=0.0)).kept == ()
        assert await sessions._store.get_blob("", name) is None
        assert await store.drafts("") == []
        await store.aclose()


async def test_who_carries_a_copy_of_what_is_forgotten_is_named(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "was", "one", "two")
        await sessions.fork("was", "early", at="turn one")
        await sessions.rename("was", "a")
        await sessions.copy("a", "copy")
        await sessions.fork("copy", "of the copy", history="context")
        await converse(sessions, "other", "one")
        await sessions.fork("other", "of another")
        dry = await sessions.forget("a", dry_run=True)
        report = await sessions.forget("a")
        assert [str(key) for key in report.carriers] == ["copy", "early", "of the copy"]
        assert dry.carriers == report.carriers
        assert [str(key) for key in (await sessions.forget("copy")).carriers] == ["of the copy"]
        assert (await sessions.forget("of another")).carriers == ()


MOVES: dict[str, Callable[[SessionManager, str, str], Awaitable[object]]] = {
    "fork": lambda sessions, id, new: sessions.fork(id, new),
    "rename": lambda sessions, id, new: sessions.rename(id, new),
}


@pytest.mark.deep
@pytest.mark.parametrize("place", ["memory", "file"], indirect=True)
@pytest.mark.parametrize("wait", [0.0, 10.0], ids=["at once", "waiting"])
@pytest.mark.parametrize("act", MOVES)
async def test_what_a_copy_is_about_to_name_outlives_the_forgetting_of_another_session(
    place: Place, act: str, wait: float
) -> None:
    """A fork goes on after its parent and another session that named the blob have gone."""
    store, nth, done, by = PausingStore(place()), 0, False, set[str]()
    step = 3 if isinstance(store._store, FileStore) else 1  # whose calls cost the most
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        while not done:
            nth += step
            a, b, new = f"a{nth}", f"b{nth}", f"new{nth}"
            name, kept = await share(second, a, b), list[str]()

            async def move() -> None:
                with contextlib.suppress(PerdureError):
                    await MOVES[act](first, b, new)  # noqa: B023

            async def forget() -> None:
                if act == "fork":
                    await second.delete(b)  # noqa: B023
                report = await second.forget(a, wait=wait)  # noqa: B023
                by.update(item.why.split()[1] for item in report.kept)
                kept.extend(item.why.split()[-1] for item in report.kept)  # noqa: B023

            pause = store.pause(None, nth=nth)
            async with anyio.create_task_group() as group:
                done = await reached_or_ended(pause, group, move)
                group.start_soon(forget)
                if not wait:
                    while not await gone(second, a):
                        await anyio.sleep(0)
                pause.go()
            await require_blob(second, new, name)
            for id in (b, new):
                await second.forget(id)
            # Told, if it is kept for a copy that is refused then: the next sweep removes it.
            assert name in kept or await second._store.get_blob("", name) is None
    assert {"reaches", "is"} <= by if act == "fork" and not wait else "reaches" in by


async def gone(sessions: SessionManager, id: str) -> bool:
    return not await sessions.exists(id)


async def put_and_name(sessions: SessionManager, b: str, new: str, data: bytes) -> None:
    name = hashlib.sha256(data).hexdigest()
    await sessions._store.put_blobs("", {name: data})
    await refer(sessions, new, name)


async def fork_and_delete(sessions: SessionManager, b: str, new: str, _data: bytes) -> None:
    await sessions.fork(b, new)
    await sessions.delete(b)


@pytest.mark.deep
@pytest.mark.parametrize("place", ["memory", "file"], indirect=True)
@pytest.mark.parametrize("act", [put_and_name, fork_and_delete])
async def test_what_is_named_while_another_session_is_forgotten_stays(
    place: Place, act: Callable[[SessionManager, str, str, bytes], Awaitable[None]]
) -> None:
    store, nth, done = PausingStore(place()), 0, False
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        while not done:
            nth += 1
            a, b, new = f"a{nth}", f"b{nth}", f"new{nth}"
            name = await share(second, *((a,) if act is put_and_name else (a, b)))
            data = await second._store.get_blob("", name)
            pause = store.pause(None, nth=nth)
            async with anyio.create_task_group() as group:
                done = await reached_or_ended(pause, group, lambda: first.forget(a))  # noqa: B023
                assert data is not None
                await act(second, b, new, data)
                pause.go()
            await require_blob(second, new, name)
            await second.forget(new)


async def test_a_session_is_forgotten_whose_holder_died_before_it_saved_its_labels(
    place: Place,
) -> None:
    """They are listed once it is open."""
    store = place()
    await store.open()
    beginning = Beginning(about=About(owner="ann", tags=("vip",)))
    await store.acquire(SessionKey("chat"), Terms(me=store.owner, after=0, beginning=beginning))
    await store.aclose()
    async with connect(place(), shutdown=QUIET) as sessions:
        assert [info.owner for info in await sessions.list(tag="vip")] == ["ann"]
        report = await sessions.forget(owner="ann")
        assert report.sessions == (SessionKey("chat"),)
        assert await ids(sessions) == []
