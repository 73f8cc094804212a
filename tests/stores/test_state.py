"""Sessions over a person's own storage of whole states (S2-3, S2-9, S2-16, S2-23, S2-30).

The parts of the conformance suite that apply are run; `UNFIT` says which do not, and why.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import (
    ConfigError,
    LeaseLostError,
    Message,
    NotStorableError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.agent import Agent, EchoModel, PersistentSession
from perdure.formats import FolderStorage, FullAgentState, read_state, write_state
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Batch, BlobSweep, Draft, Status, Store, take_after
from perdure.stores import StateStorage, StateStore
from perdure.testing.conformance import (
    BeginningConformance,
    CancellationConformance,
    DirectoryConformance,
    DocumentConformance,
    DraftConformance,
    LeaseConformance,
    LogConformance,
    ReaderConformance,
)
from tests.formats.samples import MEMORY, SESSION, write
from tests.session.test_manager import QUIET


class KeptStates:
    """What storages of one place share: bytes by key, as a database would have them."""

    def __init__(self) -> None:
        self.states: dict[SessionKey, tuple[bytes, int]] = {}
        self.saves = 0


class OwnStorage:
    """A storage as somebody might write one: it knows nothing but bytes."""

    def __init__(self, kept: KeptStates, key: SessionKey) -> None:
        self.kept = kept
        self.key = key
        self.failing: Exception | None = None

    async def save(self, state: FullAgentState) -> None:
        data = write_state(state)
        if self.failing is not None:
            raise self.failing
        self.kept.saves += 1
        self.kept.states[self.key] = (data, self.kept.saves)

    async def load(self) -> FullAgentState | None:
        if self.key not in self.kept.states:
            return None
        return read_state(self.kept.states[self.key][0]).state

    async def exists(self) -> bool:
        return self.key in self.kept.states

    async def delete(self) -> None:
        self.kept.states.pop(self.key, None)

    def get_path(self) -> str:
        return f"kept/{self.key}"

    async def get_last_modified(self) -> datetime.datetime | None:
        if self.key not in self.kept.states:
            return None
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return start + datetime.timedelta(microseconds=self.kept.states[self.key][1])


_places: dict[Path, KeptStates] = {}


class _Fixture:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        yield
        _places.clear()

    def make_store(self, place: Path, owner: str) -> Store:
        kept = _places.setdefault(place, KeptStates())
        return StateStore(lambda key: OwnStorage(kept, key), owner=owner)


UNFIT = {
    "test_records_come_back_byte_for_byte": "a state is made of records: they have to be sound",
    "test_a_race_has_exactly_one_winner": "two saves at the same moment: the later one counts",
    "test_the_holder_is_known_to_everybody": "somebody else's lease may always be taken",
    "test_a_release_is_seen": "a release is not worth a save of everything",
    "test_a_heartbeat_moves_the_beat_of_all_its_sessions": "there are no heartbeats",
    "test_a_handover_is_asked_for_at_the_holder": "there is nobody to ask",
    "test_a_holder_is_asked_and_hands_over": "there is nobody to ask",
    "test_a_session_that_is_held_is_refused": "somebody else's lease may always be taken",
    "test_a_holder_that_beats_is_not_robbed": "somebody else's lease may always be taken",
    "test_two_who_want_it_all_the_time_take_turns": "somebody else's lease may always be taken",
    "test_documents_outlive_their_store": "the state is what they would be folded to",
    "test_an_old_epoch_folds_nothing": "another object does not see this one's documents",
    "test_readers_beside_a_folding_writer_see_whole_prefixes": "documents are the folder's own",
    "test_epochs_never_start_again": "what is deleted is gone, its epoch too, for others",
    "test_a_listing_knows_what_a_session_begins_with": "the directory knows what it has seen",
    "test_a_listing_knows_what_was_saved": "the directory knows what this object has seen",
    "test_what_is_deleted_is_gone": "the directory knows what this object has seen",
    "test_a_cancelled_put_is_whole_or_nothing": "there are no blobs",
    "test_it_is_folded_reopened_and_taken_over": "the state is what they would be folded to",
    "test_it_is_deleted_and_begins_anew": "what is deleted is gone, its epoch too, for others",
    "test_nobody_reads_a_draft": "a draft is in the memory of one object",
    "test_the_holder_goes_on_after_publishing": "a draft is in the memory of one object",
    "test_publishing_again_changes_nothing": "a draft is in the memory of one object",
    "test_an_overtaken_holder_publishes_nothing": "a draft is in the memory of one object",
    "test_an_overtaken_holder_writes_nothing": "a draft is in the memory of one object",
    "test_the_holder_of_a_draft_is_waited_for": "a draft is in the memory of one object",
    "test_what_the_dead_leave_is_removed": "a draft is in the memory of one object",
    "test_drafts_are_listed_by_tenant": "a draft is in the memory of one object",
    "test_a_deleted_draft_is_gone": "a draft is in the memory of one object",
    "test_either_it_is_published_or_taken_over": "a draft is in the memory of one object",
}
"""The tests that do not apply, and why."""


def fits(suite: type) -> type:
    """Return a part of the suite without the tests that do not apply."""
    left_out = {name: None for name in UNFIT if hasattr(suite, name)}
    return type(f"Fit{suite.__name__}", (_Fixture, suite), left_out)


class TestLog(fits(LogConformance)):  # type: ignore[misc]
    pass


class TestReaders(fits(ReaderConformance)):  # type: ignore[misc]
    pass


class TestDocuments(fits(DocumentConformance)):  # type: ignore[misc]
    pass


class TestLeases(fits(LeaseConformance)):  # type: ignore[misc]
    pass


class TestDirectory(fits(DirectoryConformance)):  # type: ignore[misc]
    pass


class TestBeginnings(fits(BeginningConformance)):  # type: ignore[misc]
    pass


class TestDrafts(fits(DraftConformance)):  # type: ignore[misc]
    pass


class TestCancellation(fits(CancellationConformance)):  # type: ignore[misc]
    pass


def test_every_exception_is_of_a_test_that_is_there() -> None:
    suites = [
        LogConformance,
        ReaderConformance,
        DocumentConformance,
        LeaseConformance,
        DirectoryConformance,
        BeginningConformance,
        DraftConformance,
        CancellationConformance,
    ]
    assert [name for name in UNFIT if not any(hasattr(suite, name) for suite in suites)] == []


# sessions over it


@pytest.fixture(params=["own", "folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> StateStorage:
    if request.param == "folder":
        return FolderStorage(tmp_path / "agent")
    return OwnStorage(KeptStates(), SessionKey("ada"))


async def test_a_session_lives_in_a_storage_of_ones_own(storage: StateStorage) -> None:
    """S2-3, S2-16: any backend, with no word about files."""
    for turn in range(1, 4):
        async with perdure.connect(storage, shutdown=QUIET) as sessions:
            async with sessions.open("ada") as session:
                assert len(session.context()) == turn - 1
                async with session.turn() as begun:
                    assert begun.number == turn
                    session.append(Message.user(f"hello {turn}"))
                    session.memory.set("turn", turn)
                    session.state.set("pair", (turn, turn))
                assert session.durable_version == session.version
                assert await session.memory.get("turn") == turn
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            assert await session.state.get("pair") == (3, 3)
    # What others see is a state in the format.
    state = await storage.load()
    assert state is not None
    told = json.loads(write_state(state))
    assert [item["content"] for item in told["context"]["core"]["history"]] == [
        "hello 1",
        "hello 2",
        "hello 3",
    ]
    assert told["memory"]["entries"][0]["value"] == 3
    assert told["memory"]["stats"]["totalEntries"] == 1


async def test_a_state_of_somebody_else_is_taken_over(tmp_path: Path) -> None:
    """S2-2, S2-13: the format's own files are an agent's session."""
    storage = FolderStorage(write(tmp_path / "a", session=SESSION, memory=MEMORY))
    async with Agent.create(
        "my-assistant",
        model=EchoModel(),
        instructions="You are a helpful assistant",
        persistent_session=PersistentSession(storage=storage),
    ) as agent:
        assert [one.text for one in agent.session.context()] == [
            "You are a helpful assistant",
            "Hello!",
            "Hi. How can I help?",
        ]
        assert await agent.ask("Who am I?") == "You said: Who am I?"
    state = await storage.load()
    assert state is not None
    told = json.loads(write_state(state))
    assert told["metadata"]["title"] == "My Assistant Session"
    assert len(told["context"]["core"]["history"]) == 4
    assert (tmp_path / "a" / "memory.json").exists()


async def test_a_change_by_somebody_else_between_runs_counts(storage: StateStorage) -> None:
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("one"))
            session.state.set("mood", "good")
    state = await storage.load()
    assert state is not None
    told = json.loads(write_state(state))
    told["context"]["core"]["history"].append({"role": "user", "content": "two"})
    changed = read_state(json.dumps(told).encode()).state
    assert changed is not None
    await storage.save(changed)
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            assert [one.text for one in session.context()] == ["one", "two"]
            assert await session.state.get("mood") == "good"


async def test_whoever_was_replaced_notices_before_its_next_save(storage: StateStorage) -> None:
    """S2-30: one writer is assumed, and a second one is not overwritten."""
    async with perdure.connect(storage, shutdown=QUIET) as one:
        mine = await one.open("ada")
        mine.append(Message.user("one"))
        await mine.save()
        async with perdure.connect(storage, shutdown=QUIET) as two:
            theirs = await two.open("ada")
            theirs.append(Message.user("two"))
            await theirs.save()
            mine.append(Message.user("too late"))
            with pytest.raises(LeaseLostError):
                await mine.save()
            assert [one.text for one in theirs.context()] == ["one", "two"]
        assert await one.lost[0].discard_unsaved() == 1
    state = await storage.load()
    assert state is not None
    assert len(state.context.core.history) == 2


async def test_one_storage_is_one_sessions(storage: StateStorage) -> None:
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("x"))
            await session.save()
        for other in ({"id": "eve"}, {"id": "ada", "session": "second"}):
            with pytest.raises(ConfigError, match="storage of its own"):
                await sessions.open(**other)  # type: ignore[arg-type]
            assert await sessions.load(**other) is None  # type: ignore[arg-type]
        assert await sessions.delete("ada")
        assert not await storage.exists()


async def test_a_storage_that_fails_is_said_and_tried_again() -> None:
    """S2-23: with the place, the storage's own error as the cause, and nothing lost."""
    kept = KeptStates()
    storage = OwnStorage(kept, SessionKey("ada"))
    async with perdure.connect(storage, shutdown=QUIET, autosave=None) as sessions:
        session = await sessions.open("ada")
        session.append(Message.user("one"))
        storage.failing = RuntimeError("disk on fire")
        events, failed = list[Any](), anyio.Event()
        sessions.on("save_failed", lambda event: (events.append(event), failed.set()))
        await sessions.flush(deadline=0.01)
        await failed.wait()
        assert session.durable_version < session.version
        error = events[0].error
        assert isinstance(error, StoreUnavailableError)
        assert "kept/ada failed to save: RuntimeError: disk on fire" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
        storage.failing = None
        await session.save()
        assert session.durable_version == session.version
    state = await storage.load()
    assert state is not None
    assert len(state.context.core.history) == 1


async def test_a_newer_state_is_refused_and_left(tmp_path: Path) -> None:
    """S2-22: going on would overwrite it."""
    folder = write(tmp_path / "a", session={**SESSION, "version": 2})
    before = (folder / "session.json").read_bytes()
    async with perdure.connect(FolderStorage(folder), shutdown=QUIET) as sessions:
        with pytest.raises(UnsupportedVersionError):
            await sessions.open("my-assistant")
    assert (folder / "session.json").read_bytes() == before


async def test_a_damaged_state_starts_fresh_beside_its_evidence(tmp_path: Path) -> None:
    """S2-21, defect k: the next save does not destroy what was there."""
    folder = write(tmp_path / "a", session=b"{damaged", memory=MEMORY)
    async with perdure.connect(FolderStorage(folder), shutdown=QUIET) as sessions:
        async with sessions.open("my-assistant") as session:
            assert session.context() == []
            assert await session.memory.get("user_preferences")
            session.append(Message.user("anew"))
    (copy,) = (folder / "quarantine").iterdir()
    assert copy.read_bytes() == b"{damaged"


async def test_a_manual_agent_over_a_storage(tmp_path: Path) -> None:
    """S2-15: nothing loaded or saved but by hand."""
    storage = FolderStorage(tmp_path / "a")
    manual = PersistentSession(storage=storage, autosave_interval=0, load_on_create=False)
    async with Agent.create("ada", model=EchoModel(), persistent_session=manual) as agent:
        assert not await agent.load_persisted_session()
        await agent.ask("one")
        await agent.save_persisted_session()
    async with Agent.create("ada", model=EchoModel(), persistent_session=manual) as agent:
        assert agent.session.context() is not None
        assert await agent.load_persisted_session()
        assert [one.text for one in agent.session.context()] == ["one", "You said: one"]


async def test_a_record_that_no_state_can_be_made_of_is_refused_for_good() -> None:
    store = StateStore(OwnStorage(KeptStates(), SessionKey("ada")))
    grant = await take_after(store, SessionKey("ada"), after=0)
    batch = Batch(grant.key, grant.epoch, 2, (Entry("state", b"null"),))
    (outcome,) = await store.append_many([batch])
    assert outcome.status is Status.PERMANENT
    assert await store.head(grant.key) == 1


async def test_a_storage_keeps_no_blobs() -> None:
    store = StateStore(OwnStorage(KeptStates(), SessionKey("ada")))
    await store.put_blobs("", {})
    with pytest.raises(NotStorableError, match="a reference here"):
        await store.put_blobs("", {"name": b"data"})
    assert await store.get_blob("", "name") is None
    assert await store.sweep("", (), 0) == BlobSweep()


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="get_last_modified"):
        perdure.store_for(object())  # type: ignore[arg-type]


async def test_large_states_are_made_in_a_thread() -> None:
    kept = KeptStates()
    storage = OwnStorage(kept, SessionKey("ada"))
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            for n in range(600):
                session.append(Message.user(f"text {n}"))
            await session.save()
    async with perdure.connect(storage, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            assert len(session.context()) == 600


async def test_asking_for_what_is_not_there_fills_no_memory() -> None:
    kept = KeptStates()
    store = StateStore(lambda key: OwnStorage(kept, key))
    for place in range(20):
        assert await store.head(SessionKey(f"guess {place}")) == 0
        assert await store.holder(SessionKey(f"guess {place}")) is None
    assert not store._slots
    grant = await take_after(store, SessionKey("ada"), after=0)
    assert await store.head(SessionKey("ada")) == grant.head
    assert [info.key.agent for info in await store.sessions()] == ["ada"]


DRAFT = Draft(source=SessionKey("source"), generation=1, up_to=640, purpose="fork")


async def test_a_draft_is_saved_when_it_is_published() -> None:
    kept, key = KeptStates(), SessionKey("copy")
    store, other = (StateStore(lambda key: OwnStorage(kept, key)) for _ in range(2))
    grant = await take_after(store, key, after=0, first=501, draft=DRAFT)
    message = Entry("message", b'{"role":"user","content":[{"type":"text","text":"Hello"}]}')
    (outcome,) = await store.append_many([Batch(key, grant.epoch, 502, (message,))])
    assert outcome.status is Status.OK
    assert kept.saves == 0
    assert await store.head(key) == 0
    assert [info.key for info in await store.drafts("")] == [key]
    await store.publish(key, grant.epoch)
    await store.publish(key, grant.epoch)
    assert kept.saves == 1
    assert await store.drafts("") == []
    records = [record async for chunk in other.read_log(key) for record in chunk.records]
    assert [record.seq for record in records] == [501, 502]
    new = await take_after(other, key, after=grant.epoch)
    assert (new.head, new.created) == (503, False)


async def test_a_draft_is_not_published_over_another_program_s_session() -> None:
    kept, key = KeptStates(), SessionKey("copy")
    store, other = (StateStore(lambda key: OwnStorage(kept, key)) for _ in range(2))
    grant = await take_after(store, key, after=0, draft=DRAFT)
    await take_after(other, key, after=0)
    with pytest.raises(LeaseLostError):
        await store.publish(key, grant.epoch)
    assert (kept.saves, await other.head(key)) == (1, 1)
