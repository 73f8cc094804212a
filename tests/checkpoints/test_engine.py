"""Checkpoints of a session: made, looked at, gone back to, let go."""

from __future__ import annotations

import datetime
from typing import Any

import anyio
import msgspec
import pytest

from perdure import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    Message,
    NotStorableError,
    Retention,
    Session,
    Shutdown,
    connect,
)
from perdure.checkpoints.chain import canonical, digest, sealed
from perdure.records.checkpoints import CapturedState, ExplicitState
from perdure.records.keys import SessionKey
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import Sandbox
from tests.session.conftest import Connect
from tests.session.lives import converse, looks, said

LARGE = {"items": [{"id": number, "text": f"{number}" * 50} for number in range(400)]}


async def talk(session: Session, text: str) -> None:
    """Have a turn that changes everything a session has."""
    async with session.turn():
        session.append(Message.user(text))
        session.memory.set("last", text)
        session.memory.set(f"large {text}", text * 1000)
        session.state.set("plan", {"said": text})
        session.state.set(f"at {text}", datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))


async def whole(session: Any) -> dict[str, Any]:
    look = await looks(session)
    return {name: look[name] for name in ("said", "told", "memory", "state")}


# making them


async def test_ids_and_times_go_on_after_a_restart(again: Connect) -> None:
    """S3-1: a record of id, label, state and logical time; S3-3: each create has a fresh id."""
    async with again() as sessions, sessions.open("a") as session:
        await session.checkpoints.create("one", {"n": 1})
        await talk(session, "hello")
        await session.checkpoints.create("two")
        await session.checkpoints.prune(keep=0)
    async with again() as sessions, sessions.open("a") as session:
        third = await session.checkpoints.create("three", {"n": 3})
        restored = await session.checkpoints.restore(third.id)
        assert restored is not None
        assert (restored.id, restored.label, restored.state) == (3, "three", {"n": 3})
        assert restored.timestamp == third.timestamp == 6  # two with an event each, one pruning
        assert (await session.checkpoints.verify()).ok


async def test_the_latest_and_all_of_them_in_order(again: Connect) -> None:
    """S3-2, S3-5, S3-G1: explicit ids, in their order; the latest is at hand."""
    async with again() as sessions, sessions.open("a") as session:
        assert await session.checkpoints.latest() is None
        made = [await session.checkpoints.create(f"c{n}", {"n": n}) for n in range(4)]
        await session.checkpoints.prune(keep=[1, 3, 4])
        left = [made[0], made[2], made[3]]
        assert await session.checkpoints.states() == left
        assert await session.checkpoints.latest() == made[3]
        await session.aclose()
        view = await sessions.load("a")
        assert view is not None
        assert await view.checkpoints.states() == left
        assert await view.checkpoints.latest() == made[3]


async def test_a_checkpoint_and_its_event_are_one_group(again: Connect) -> None:
    """S3-3: the event links the turn's token to the checkpoint; S3-G2: on one clock."""
    async with again() as sessions, sessions.open("a") as session:
        before = session.events.emit("custom", "plan", {"goal": "draft"})
        async with session.turn() as turn:
            made = await session.checkpoints.create("within")
            inside = session.events.emit("custom")
        after = session.events.emit("custom")
        await session.save()
        events = await session.events.read()
        assert [one.kind for one in events] == ["custom", "snapshot_created", "custom", "custom"]
        assert [one.timestamp for one in (before, made)] == [1, 2]
        assert [one.timestamp for one in events] == [1, 3, 4, 5]
        assert events[1].detail == {"snapshot": made.id}
        assert events[1].token_id == inside.token_id == turn.number == 1
        assert before.token_id == after.token_id == 0
        store = again.store
        async for chunk in store.read_log(session.key, after=made.event_seq, limit=2):
            kinds = [(one.kind, one.end) for one in chunk.records]
            assert kinds == [("checkpoint", False), ("event", True)]


async def test_an_event_must_be_json(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(NotStorableError, match="datetime"):
            session.events.emit("custom", detail={"at": datetime.datetime.now(datetime.UTC)})
        assert session.events.emit("custom").timestamp == 1


async def test_the_clock_goes_on_after_a_kill() -> None:
    """S3-G2: times come from the session's own records, wherever it is opened again."""
    async with Sandbox() as sandbox:
        async with sandbox.sessions.open("a") as session:
            for _ in range(3):
                session.events.emit("custom")
            await session.save()
        view = await sandbox.sessions.load("a")  # nothing of it is folded yet
        assert view is not None
        assert [one.timestamp for one in await view.events.read()] == [1, 2, 3]
        await sandbox.reopen()
        async with sandbox.sessions.open("a") as session:
            assert session.events.emit("custom").timestamp == 4


async def test_a_captured_checkpoint_copies_nothing(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        for number in range(30):
            await talk(session, f"number {number}")
        made = await session.checkpoints.create("here")
        assert isinstance(made.state, CapturedState)
        assert len(msgspec.json.encode(made)) < 400
        assert made.state.since == 0
        await talk(session, "more")
        later = await session.checkpoints.create("there")
        assert isinstance(later.state, CapturedState)
        assert later.state.since == made.event_seq


async def test_unsaved_records_are_part_of_it(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        session.append(Message.user("not saved yet"))
        made = await session.checkpoints.create("here")
        assert session.durable_version == session.version
        restored = await session.checkpoints.restore(made.id)
        assert restored is not None
        assert [one["content"] for one in restored.state["context"]] == ["not saved yet"]
        assert (await session.checkpoints.verify()).ok


@pytest.mark.parametrize("state", [{"n": 1}, LARGE], ids=["small", "large"])
async def test_a_given_state_is_nobody_elses(again: Connect, state: dict[str, Any]) -> None:
    """S3-G4: neither what was given nor what comes back is shared; S3-4: restore changes nothing."""
    theirs: dict[str, Any] = {"inner": [1], **state}
    async with again() as sessions, sessions.open("a") as session:
        made = await session.checkpoints.create("given", theirs)
        theirs["inner"].append("changed later")
        version = session.version
        one = await session.checkpoints.restore(made.id)
        assert one is not None
        assert one.state == {"inner": [1], **state}
        one.state["inner"].append("changed by its reader")
        two = await session.checkpoints.restore(made.id)
        assert two is not None
        assert two.state["inner"] == [1]
        assert session.version == version


async def test_an_unknown_id_restores_nothing(again: Connect) -> None:
    """S3-4: unknown gives None, pruned ones too."""
    async with again() as sessions, sessions.open("a") as session:
        made = await session.checkpoints.create("one", {"n": 1})
        assert await session.checkpoints.restore(7) is None
        assert await session.checkpoints.get(7) is None
        await session.checkpoints.prune(keep=0)
        assert await session.checkpoints.restore(made.id) is None


async def test_a_state_has_types_and_a_hash_of_its_content(again: Connect) -> None:
    """S3-6: the content is hashed; the same content has the same hash."""
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    async with again() as sessions, sessions.open("a") as session:
        one = await session.checkpoints.create("one", {"when": when, "n": (1, 2)})
        two = await session.checkpoints.create("two", {"n": (1, 2), "when": when})
        restored = await session.checkpoints.restore(two.id)
        assert restored is not None
        assert restored.state == {"when": when, "n": (1, 2)}
        assert digest(canonical(one.state)) == digest(canonical(two.state))
        with pytest.raises(NotStorableError, match="state"):
            await session.checkpoints.create("three", {"file": object()})
        with pytest.raises(ConfigError, match="label"):
            await session.checkpoints.create(3)  # type: ignore[arg-type]
        assert len(await session.checkpoints.states()) == 2


async def test_large_states_share_what_they_have_in_common(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        store = again.store
        await session.checkpoints.create("one", LARGE)
        first = set(await store.blob_names(""))
        more = {"items": [*LARGE["items"], {"id": 400, "text": "one more"}]}
        await session.checkpoints.create("two", more)
        second = set(await store.blob_names("")) - first
        assert len(first) > 5 * len(second)
        await session.aclose()
        session = await sessions.open("a")  # it has to find out what there is
        even = {"items": [*more["items"], {"id": 401, "text": "and more"}]}
        last = await session.checkpoints.create("three", even)
        assert len(set(await store.blob_names("")) - first - second) <= len(second) + 2
        restored = await session.checkpoints.restore(last.id)
        assert restored is not None
        assert restored.state == even


async def test_what_a_checkpoint_holds_can_be_written_down(again: Connect) -> None:
    """S3-8: id, label, timestamp and state of each, beside the events; S3-9: that is all of it."""
    async with again() as sessions, sessions.open("a") as session:
        session.events.emit("custom", "plan", {"goal": "draft"})
        await session.checkpoints.create("reflect-after-action", {"memory": "vector://xyz"})
        lines = []
        for one in await session.checkpoints.states():
            restored = await session.checkpoints.restore(one.id)
            assert restored is not None
            fields = msgspec.to_builtins(restored)
            lines.append({"snapshot_id": fields.pop("id"), **fields})
        assert lines == [
            {
                "snapshot_id": 1,
                "label": "reflect-after-action",
                "timestamp": 2,
                "state": {"memory": "vector://xyz"},
            }
        ]
        events = [msgspec.to_builtins(one) for one in await session.events.read()]
        assert events[1] == {
            "token_id": 0,
            "timestamp": 3,
            "kind": "snapshot_created",
            "label": "reflect-after-action",
            "detail": {"snapshot": 1},
        }


# comparing them


async def test_a_difference_names_what_changed(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        await talk(session, "one")
        await session.checkpoints.create("one")
        await talk(session, "two")
        session.memory.drop("large one")
        await session.checkpoints.create("two")
        found = await session.checkpoints.diff(1, 2)
        assert {path for path in found.added if "/context/" not in path} == {
            "/memory/large two",
            "/state/at two",
        }
        (message,) = [one for path, one in found.added.items() if "/context/" in path]
        assert message["content"] == "two"
        assert list(found.removed) == ["/memory/large one"]
        assert found.changed["/state/plan/said"].after == "two"
        assert not await session.checkpoints.diff(2, 2)
        with pytest.raises(CheckpointNotFoundError, match="never made"):
            await session.checkpoints.diff(1, 9)


# going back


async def test_going_back_is_a_new_entry_and_history_stays(again: Connect) -> None:
    """S3-7: what was is again, and the events since come back to be replayed; S3-6: by appending."""
    async with again() as sessions, sessions.open("a") as session:
        await talk(session, "one")
        first = await session.checkpoints.create("one")
        then = await whole(session)
        await talk(session, "two")
        session.events.emit("custom", "after")
        second = await session.checkpoints.create("two")
        later = await whole(session)
        log = [one async for chunk in again.store.read_log(session.key) for one in chunk.records]

        back = await session.checkpoints.rollback(first.id, replay=True)
        assert back.checkpoint.label == "rollback::one#1"
        assert back.to == first
        assert [one.label for one in back.events] == ["after", "two"]
        assert await whole(session) == then

        forth = await session.checkpoints.rollback(second.id)
        assert forth.events == ()
        assert await whole(session) == later
        after = [one async for chunk in again.store.read_log(session.key) for one in chunk.records]
        assert after[: len(log)] == log
        restored = [await session.checkpoints.restore(n) for n in (2, forth.checkpoint.id)]
        assert restored[0] is not None
        assert restored[1] is not None
        assert [one["content"] for one in restored[0].state["context"]] == ["one", "two"]
        assert restored[0].state["memory"] == restored[1].state["memory"]
        assert (await session.checkpoints.verify()).ok
    async with again() as sessions, sessions.open("a") as session:
        assert await whole(session) == later


async def test_going_back_behind_a_fold_and_a_cut_context(again: Connect) -> None:
    async with again(limits=limits(context_bytes=600)) as sessions:
        session = await sessions.open("a")
        for number in range(6):
            await talk(session, f"number {number}")
        first = await session.checkpoints.create("early")
        then = said(session)
        await session.aclose()  # folds
        session = await sessions.open("a")
        for number in range(20):
            await talk(session, f"later {number}")
        await session.checkpoints.rollback(first.id)
        assert said(session) == then
        assert await session.memory.get("last") == "number 5"


def limits(**values: Any) -> Any:
    from perdure import Limits

    return Limits(**values)


async def test_a_given_state_comes_back_and_the_session_stays(again: Connect) -> None:
    """S3-7: the caller applies what it gave; the entry refers to the same content."""
    async with again() as sessions, sessions.open("a") as session:
        first = await session.checkpoints.create("given", LARGE)
        await talk(session, "one")
        blobs = await again.store.blob_names("")
        back = await session.checkpoints.rollback(first.id)
        assert back.state == LARGE
        assert back.checkpoint.state == first.state
        assert said(session) == ["one"]
        assert sorted(await again.store.blob_names("")) == sorted(blobs)


async def test_what_cannot_be_gone_back_to_changes_nothing(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        made = await session.checkpoints.create("given", LARGE)
        assert isinstance(made.state, ExplicitState)
        version = session.version
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint 5"):
            await session.checkpoints.rollback(5)
        await again.store.remove_blobs("", [made.state.root])
        with pytest.raises(CorruptRecordError, match=made.state.root):
            await session.checkpoints.rollback(made.id)
        assert session.version == version
        assert [one.id for one in (await session.checkpoints.verify()).problems] == [made.id]


class Plugin:
    name = "notes"
    version = 1

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def capture(self) -> Any:
        return self.notes

    async def restore(self, state: Any, context: object) -> None:
        self.notes = list(state)


async def test_contributors_take_back_what_they_had(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        plugin = Plugin()
        await session.attach(plugin)
        plugin.notes.append("one")
        first = await session.checkpoints.create("one")
        plugin.notes.append("two")
        await session.checkpoints.rollback(first.id)
        assert plugin.notes == ["one"]
        await session.save()
        plugin.notes.append("three")
        await session.save()
        restored = await session.checkpoints.restore(first.id)
        assert restored is not None
        assert restored.state["plugins"] == {"notes": ["one"]}
    async with again() as sessions, sessions.open("a") as session:
        other = Plugin()
        await session.attach(other)
        assert other.notes == ["one", "three"]


class Stubborn(Plugin):
    name = "stubborn"

    async def restore(self, state: Any, context: object) -> None:
        raise ValueError("never back")


async def test_a_contributor_that_fails_to_go_back_keeps_nobody_else_from_it(
    again: Connect,
) -> None:
    """S3-11: what goes back stays so, and a guard says of the rest that it did not."""
    async with again() as sessions, sessions.open("a") as session:
        stubborn, plugin = Stubborn(), Plugin()
        for one in (stubborn, plugin):
            await session.attach(one)
            one.notes.append("one")
        first = await session.checkpoints.create("one")
        for one in (stubborn, plugin):
            one.notes.append("two")
        with pytest.raises(ValueError, match="never back"):
            await session.checkpoints.rollback(first.id)
        assert plugin.notes == ["one"]
        with pytest.raises(ZeroDivisionError) as caught:
            async with session.checkpoints.guard("trial"):
                plugin.notes.append("three")
                _ = 1 / 0
        assert "never back" in caught.value.__notes__[0]
        assert plugin.notes == ["one"]
    async with again() as sessions, sessions.open("a") as session:
        other = Plugin()
        await session.attach(other)
        assert other.notes == ["one"]


async def test_a_guard_goes_back_when_its_block_fails(again: Connect) -> None:
    """S3-11: rollback on failure; the failure goes on."""
    async with again() as sessions, sessions.open("a") as session:
        await talk(session, "before")
        then = await whole(session)
        with pytest.raises(ZeroDivisionError):
            async with session.checkpoints.guard("trial"):
                await talk(session, "within")
                _ = 1 / 0
        assert await whole(session) == then
        async with session.checkpoints.guard("trial"):
            await talk(session, "kept")
        assert said(session) == ["before", "kept"]
        labels = [one.label for one in await session.checkpoints.states()]
        assert labels == ["trial", "rollback::trial#1", "trial"]


async def test_a_guard_goes_back_when_it_is_cancelled(again: Connect) -> None:
    """S3-11: also then all of it, or nothing."""
    async with again() as sessions, sessions.open("a") as session:
        await talk(session, "before")
        then = await whole(session)
        with anyio.CancelScope() as scope:
            async with session.checkpoints.guard("trial"):
                await talk(session, "within")
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert await whole(session) == then


async def test_a_guard_says_that_it_could_not_go_back(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(ZeroDivisionError) as failed:
            async with session.checkpoints.guard("trial") as made:
                await session.checkpoints.prune(keep=0)
                _ = 1 / 0
        assert any(f"checkpoint {made.id}" in note for note in failed.value.__notes__)


async def test_while_others_append_nothing_of_theirs_is_lost_unseen(again: Connect) -> None:
    """A rollback is of one moment: what came before it goes, what comes behind it stays."""
    async with again() as sessions, sessions.open("a") as session:
        await talk(session, "one")
        first = await session.checkpoints.create("one")
        async with anyio.create_task_group() as group:
            group.start_soon(session.checkpoints.rollback, first.id)
            for number in range(3):
                await anyio.lowlevel.checkpoint()
                session.append(Message.user(f"beside {number}"))
        await session.save()
        assert said(session)[0] == "one"
        assert (await session.checkpoints.verify()).ok


# tampering


@pytest.mark.parametrize(
    ("kind", "old", "new", "named"),
    [
        ("message", b"Hello", b"Hullo", [2]),
        ("checkpoint", b'"label":"two"', b'"label":"too"', [2, 3]),
        ("checkpoint", b'"timestamp":3', b'"timestamp":4', [2, 3]),
        ("checkpoint", b'"value":{"n":1}', b'"value":{"n":2}', [1, 2]),
    ],
)
async def test_what_was_changed_in_the_log_is_found_and_named(
    kind: str, old: bytes, new: bytes, named: list[int]
) -> None:
    """S3-G3: the whole record is hashed, and so is what it is of; S3-11: an audit can rely on it.

    A changed checkpoint shows at itself and, since its record is part of the log, in the digest
    of the next one of the session.
    """
    backing, quiet = MemoryBacking(), Shutdown(signals=False)
    async with (
        connect(MemoryStore(backing=backing), shutdown=quiet) as sessions,
        sessions.open("a") as session,
    ):
        await session.checkpoints.create("one", {"n": 1})
        session.append(Message.user("Hello"))
        await session.checkpoints.create("two")
        await session.checkpoints.create("three")
        entries = backing.sessions[session.key].entries
        (place,) = [at for at, one in enumerate(entries) if one.kind == kind and old in one.payload]
        entries[place] = entries[place]._replace(payload=entries[place].payload.replace(old, new))
    for owner in ("reader", "rebuilt"):
        if owner == "rebuilt":  # the chain is read from the log, the changed records too
            backing.sessions[SessionKey("a")].documents.clear()
        async with connect(MemoryStore(backing=backing, owner=owner), shutdown=quiet) as sessions:
            view = await sessions.load("a")
            assert view is not None
            found = await view.checkpoints.verify()
            ids = sorted({problem.id for problem in found.problems})
            assert set(ids) <= set(named)
            if owner == "reader":
                assert ids
                continue
            assert ids[0] == named[0]
            async with sessions.open("a") as session:
                with pytest.raises(CorruptRecordError, match=f"checkpoint {named[0]} "):
                    await session.checkpoints.rollback(named[0])
        backing.sessions[view.key].manifest = None


async def test_what_was_cut_off_and_what_the_log_says_otherwise_is_found() -> None:
    """S3-G3: the documents are sound by themselves, and the log is not what they were made of."""
    backing, quiet = MemoryBacking(), Shutdown(signals=False)
    async with (
        connect(MemoryStore(backing=backing), shutdown=quiet) as sessions,
        sessions.open("a") as session,
    ):
        session.append(Message.user("Hello"))
        made = await session.checkpoints.create("one")
    kept = backing.sessions[session.key]
    place = next(at for at, one in enumerate(kept.entries) if one.kind == "checkpoint")
    recorded = kept.entries[place]
    other = sealed(msgspec.structs.replace(made, label="other"))
    kept.entries[place] = recorded._replace(payload=msgspec.json.encode(other))
    async with connect(MemoryStore(backing=backing, owner="reader"), shutdown=quiet) as sessions:
        view = await sessions.load("a")
        assert view is not None
        (problem,) = (await view.checkpoints.verify()).problems
        assert problem.id == made.id
        assert "is another one than the document's" in problem.what
        kept.entries[place] = recorded
        assert (await view.checkpoints.verify()).ok
        del kept.entries[made.event_seq - 1 :]
        (problem,) = (await view.checkpoints.verify()).problems
        assert problem.id == made.id
        assert "was changed or is missing" in problem.what


# letting go


async def test_pruning_leaves_tombstones_and_frees_states(again: Connect) -> None:
    """S3-G5: only when asked for; the chain holds; what only they kept is nobody's any more."""
    from perdure.cli.check import audit, garbage

    async with again() as sessions:
        session = await sessions.open("a")
        await session.checkpoints.create("one", LARGE)
        await session.checkpoints.create("two", {"items": LARGE["items"][:200]})
        assert await session.checkpoints.prune(keep=[2]) == (1,)
        assert await session.checkpoints.prune(keep=5) == ()
        with pytest.raises(InvalidArgumentError, match="keep=-1"):
            await session.checkpoints.prune(keep=-1)
        with pytest.raises(CheckpointNotFoundError, match="keep names \\[7\\]"):
            await session.checkpoints.prune(keep=[7])
        report = await session.checkpoints.verify()
        assert (report.ok, report.checkpoints, report.pruned) == (True, 1, 1)
        assert (await session.checkpoints.create("three", {"n": 3})).id == 3
        with pytest.raises(CheckpointNotFoundError, match="was pruned"):
            await session.checkpoints.rollback(1)
        await session.aclose()
        store = again.store
        found, reached = await garbage(
            store, "", set(await store.blob_names("")), [await audit(store, SessionKey("a"))]
        )
        assert 0 < found.unreachable < found.blobs
        gone = set(await store.blob_names("")) - reached
        await store.remove_blobs("", gone)
        view = await sessions.load("a")
        assert view is not None
        restored = await view.checkpoints.restore(2)
        assert restored is not None
        assert restored.state == {"items": LARGE["items"][:200]}


async def test_history_stays_as_far_as_checkpoints_need_it(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two")
        async with sessions.open("a") as session:
            made = await session.checkpoints.create("here")
            then = await whole(session)
        await converse(sessions, "a", "three", "four")
        report = await sessions.prune(Retention(keep_turns=0), id="a")
        assert [one.checkpoint for one in report.kept_for] == [made.id]
        assert [one.cut <= made.event_seq for one in report.pruned] == [True]
        async with sessions.open("a") as session:
            verified = await session.checkpoints.verify()
            assert (verified.ok, verified.unchecked) == (True, (made.id,))
            await session.checkpoints.rollback(made.id)
            now = await whole(session)
            assert {**now, "told": 0} == {**then, "told": 0}
            await session.checkpoints.prune(keep=0)
        report = await sessions.prune(Retention(keep_turns=0), id="a")
        assert report.kept_for == ()
        async with sessions.open("a") as session:
            assert (await session.checkpoints.create("after")).id == 3
            assert (await session.checkpoints.verify()).ok


# forks


async def test_a_fork_at_a_checkpoint_begins_there(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        await talk(session, "one")
        made = await session.checkpoints.create("here", LARGE)
        here = await session.checkpoints.create("and here")
        then = await whole(session)
        await talk(session, "two")
        blobs = await again.store.blob_names("")
        await sessions.fork("a", "b", at=here)
        await session.checkpoints.prune(keep=0)
        async with sessions.open("b") as fork:
            assert await whole(fork) == then
            assert [one.id for one in await fork.checkpoints.states()] == [made.id, here.id]
            restored = await fork.checkpoints.restore(made.id)
            assert restored is not None
            assert restored.state == LARGE
            await talk(fork, "of its own")
            await fork.checkpoints.rollback(here.id)
            assert await whole(fork) == then
            assert (await fork.checkpoints.create("own")).id == 4
            assert (await fork.checkpoints.verify()).ok
        assert len(blobs) <= len(await again.store.blob_names(""))
        async with sessions.open("c") as other:
            await other.save()
        with pytest.raises(ConfigError, match="does not stand"):
            await sessions.fork("c", "d", at=here)


async def test_a_store_without_blobs_keeps_states_in_records() -> None:
    class Plain(MemoryStore):  # type: ignore[misc]  # final for users
        @property
        def capabilities(self) -> Any:
            return msgspec.structs.replace(super().capabilities, blobs=False)

    async with (
        connect(Plain(backing=MemoryBacking()), shutdown=Shutdown(signals=False)) as sessions,
        sessions.open("a") as session,
    ):
        made = await session.checkpoints.create("one", LARGE)
        restored = await session.checkpoints.restore(made.id)
        assert restored is not None
        assert restored.state == LARGE
