"""Sessions over a store: what users rely on, on both loops and two stores."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import (
    EncodedRecord,
    Message,
    NotStorableError,
    SessionClosedError,
    SessionError,
    Shutdown,
    connect,
)
from perdure.autosave.options import Autosave
from perdure.errors import TooLargeError
from perdure.session.internals import store_below
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from tests.session.conftest import Connect

QUIET = Shutdown(signals=False)


def contents(messages: list[Message]) -> list[object]:
    return [message.content for message in messages]


async def test_saved_messages_are_there_after_a_restart(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        version = session.append(Message.user("hello"), Message.assistant("hi"))
        receipt = await session.save()
        assert receipt.version == session.durable_version == version
    async with again() as sessions, sessions.open("a") as session:
        assert contents(session.context()) == ["hello", "hi"]


async def test_closing_the_manager_saves_what_was_only_appended(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        session.append(Message.user("hello"))
        assert session.durable_version < session.version
    async with again() as sessions:
        view = await sessions.load("a")
        assert view is not None
        assert contents(view.context()) == ["hello"]


async def test_leaving_a_turn_makes_it_durable(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            session.append(Message.user("hello"))
            assert turn.id == "turn_0001"
        assert session.durable_version == session.version
        view = await sessions.load("a")
        assert view is not None
        assert contents(view.context()) == ["hello"]


async def test_turn_numbers_go_on_after_a_restart(again: Connect) -> None:
    """Defect d of the seeds' projects: counters must not start again."""
    for expected in ("turn_0001", "turn_0002", "turn_0003"):
        async with again() as sessions, sessions.open("a") as session:
            async with session.turn() as turn:
                assert turn.id == expected


async def test_turns_run_one_at_a_time_first_come_first_served(again: Connect) -> None:
    order: list[str] = []

    async def one(name: str, session: object, started: anyio.Event) -> None:
        started.set()
        async with session.turn():  # type: ignore[attr-defined]
            order.append(f"{name} in")
            await anyio.lowlevel.checkpoint()
            order.append(f"{name} out")

    async with again() as sessions, sessions.open("a") as session:
        async with anyio.create_task_group() as group, session.turn():
            for name in "bcd":
                started = anyio.Event()
                group.start_soon(one, name, session, started)
                await started.wait()
            group.cancel_scope.shield = False
            order.append("a out")
            # The three wait behind this turn; it ends when the block is left.
            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            for name in "bcd":
                started = anyio.Event()
                group.start_soon(one, name, session, started)
                await started.wait()
    assert order[0] == "a out"
    assert order[1:] == [f"{name} {where}" for name in "bcd" for where in ("in", "out")]


async def test_a_turn_inside_a_turn_is_refused_instead_of_hanging(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session, session.turn():
        with pytest.raises(SessionError, match="already is in a turn"):
            async with session.turn():
                raise AssertionError("unreachable")


async def test_a_turn_left_by_an_error_is_closed_as_interrupted_and_saved(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        with pytest.raises(RuntimeError, match="boom"):
            async with session.turn():
                session.append(Message.user("hello"))
                raise RuntimeError("boom")
        assert session.durable_version == session.version
        async with session.turn():
            session.append(Message.user("again"))
        assert contents(session.context()) == ["hello", "again"]


async def test_a_cancelled_turn_is_saved_as_interrupted(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with anyio.CancelScope() as scope:
            async with session.turn():
                session.append(Message.user("hello"))
                scope.cancel()
                await anyio.sleep_forever()
        await session.wait_durable()
        kinds = [record async for record in phases(sessions, "a")]
    assert kinds == ["begin", "interrupted"]


async def phases(sessions: SessionManager, agent: str):  # type: ignore[no-untyped-def]
    import msgspec

    from perdure.records.keys import SessionKey

    async for chunk in store_below(sessions).read_log(SessionKey(agent)):
        for record in chunk.records:
            if record.kind == "turn":
                yield msgspec.json.decode(record.payload)["phase"]


async def test_emit_sends_once_all_before_it_is_durable(again: Connect) -> None:
    sent: list[tuple[str, int]] = []
    async with again(autosave=None) as sessions, sessions.open("a") as session:

        async def send(text: str) -> None:
            sent.append((text, session.durable_version))

        async with session.turn() as turn:
            version = session.append(Message.user("hello"))
            await turn.emit("ok", send)
    assert sent == [("ok", version)]


async def test_memory_and_state_come_back_with_their_types(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.memory.set("plan", {"steps": [1, 2]}, description="what to do", pinned=True)
        session.memory.set("gone", 1)
        session.memory.drop("gone")
        session.state.set("raw", b"\x00\xff")
        session.state.set("config", {"temperature": 0.5})
        session.state.set("dropped", 1)
        session.state.drop("dropped")
        assert await session.state.get("raw") == b"\x00\xff"
    for _ in range(2):  # once from what close folded, once more
        async with again() as sessions, sessions.open("a") as session:
            assert await session.memory.get("plan") == {"steps": [1, 2]}
            assert await session.memory.get("gone", "nothing") == "nothing"
            assert await session.memory.keys() == ["plan"]
            assert await session.state.get("raw") == b"\x00\xff"
            assert await session.state.get("config") == {"temperature": 0.5}
            assert await session.state.get("dropped") is None
            assert await session.state.keys() == ["config", "raw"]


async def test_what_is_set_before_the_memory_is_loaded_does_not_lose_the_rest(
    again: Connect,
) -> None:
    """S2-24: a partial load is never written back over the whole."""
    async with again() as sessions, sessions.open("a") as session:
        session.memory.set("old", 1)
    async with again() as sessions, sessions.open("a") as session:
        session.memory.set("new", 2)
    async with again() as sessions, sessions.open("a") as session:
        assert await session.memory.keys() == ["old", "new"]


async def test_concurrent_first_touches_of_memory_see_one_load(again: Connect) -> None:
    """S2-24."""
    async with again() as sessions, sessions.open("a") as session:
        session.memory.set("k", 1)
    seen: list[object] = []
    async with again() as sessions, sessions.open("a") as session:

        async def touch() -> None:
            seen.append(await session.memory.get("k"))

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(touch)
            session.memory.set("k", 2)
    assert set(seen) <= {1, 2}
    assert len(seen) == 10


async def test_folds_and_their_tail_restore_the_same_session(again: Connect) -> None:
    limits = Limits(fold_records=10, context_bytes=4000)
    async with again(limits=limits) as sessions, sessions.open("a") as session:
        for number in range(100):
            async with session.turn():
                session.append(Message.user(f"question {number}"))
                session.append(Message.assistant(f"answer {number}"))
                session.memory.set(f"k{number % 7}", number)
        live = session.context()
        memory = {key: await session.memory.get(key) for key in await session.memory.keys()}
    async with again(limits=limits) as sessions, sessions.open("a") as session:
        assert session.context() == live
        assert session.info.turns == 100
        assert session.info.messages == 200
        assert {k: await session.memory.get(k) for k in await session.memory.keys()} == memory
        assert session.restore_report.source == "snapshot"


async def test_history_pages_backwards_over_saved_and_unsaved(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        for number in range(10):
            session.append(Message.user(str(number)))
        await session.save()
        session.append(Message.user("unsaved"))
        pages: list[list[object]] = []
        before = None
        while page := await session.history(before=before, limit=4):
            pages.append([item.value.content for item in page])
            before = page[0].seq
    assert pages == [["7", "8", "9", "unsaved"], ["3", "4", "5", "6"], ["0", "1", "2"]]


async def test_a_view_without_the_context_has_all_else(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        async with session.turn():
            session.append(Message.user("folded"))
        session.state.set("mood", "calm")
        await session.aclose()
    async with again() as sessions, sessions.open("a", tags=["new"]) as session:
        session.append(Message.user("not folded"))
        await session.memory.keys()
        session.memory.set("fact", 1)
        await session.save()
        whole, view = await sessions.load("a"), await sessions.load("a", context=False)
        assert whole is not None
        assert view is not None
        assert view.restore_report.source == "left_out"
        assert view.seq == whole.seq
        assert await view.history() == await whole.history()
        assert view.info == whole.info
        assert await view.memory.get("fact") == 1
        assert await view.state.get("mood") == "calm"
        with pytest.raises(SessionError, match="context=False"):
            view.context()
        assert await sessions.load("nobody", context=False) is None


async def test_what_cannot_be_stored_is_refused_at_append_and_changes_nothing(
    again: Connect,
) -> None:
    async with again() as sessions, sessions.open("a") as session:
        version = session.version
        with pytest.raises(NotStorableError):
            session.append(Message.user("fine"), object())
        assert session.version == version
        assert session.context() == []


async def test_too_large_an_item_is_refused_with_the_limit(again: Connect) -> None:
    async with again(limits=Limits(record_bytes=1000)) as sessions, sessions.open("a") as session:
        with pytest.raises(
            TooLargeError, match=r"record_bytes=…\), which may be up to \d"
        ) as caught:
            session.append(Message.user("x" * 1000))
        assert "session a: a message record of 10" in str(caught.value)


async def test_a_limit_that_is_the_stores_own_is_not_said_to_be_raised(again: Connect) -> None:
    large = Limits(record_bytes=16 * 1024 * 1024)
    async with again(limits=large) as sessions, sessions.open("a") as session:
        with pytest.raises(TooLargeError, match="store a reference") as caught:
            session.append(Message.user("x" * 17 * 1024 * 1024))
        assert "record_bytes" not in str(caught.value)


async def test_encoded_items_are_taken_as_they_are(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.append(EncodedRecord("message", b'{"role":"user","content":"raw","vendor":1.0}'))
    async with again() as sessions:
        view = await sessions.load("a")
        assert view is not None
        [message] = view.context()
        assert message.content == "raw"
        assert bytes(message.extra["vendor"]) == b"1.0"


async def test_closed_session_says_what_to_do(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        await session.aclose()
        with pytest.raises(SessionClosedError, match="open it again"):
            session.append(Message.user("late"))
        async with sessions.open("a") as other:
            other.append(Message.user("on time"))


async def test_view_is_read_only(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.append(Message.user("x"))
        await session.save()
        view = await sessions.load("a")
        assert view is not None
        with pytest.raises(SessionError, match="read-only"):
            view.memory.set("k", 1)
        assert [item.value.content for item in await view.history()] == ["x"]


async def test_describe_shows_in_info_and_listing(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("a", owner="o1", tags=["t1"]) as session:
            session.describe(title="A talk", mood="calm")
            assert session.info.metadata.title == "A talk"
            await session.aclose()
        [info] = await sessions.list()
        assert (info.title, info.owner, info.tags) == ("A talk", "o1", ("t1",))
        view = await sessions.load("a")
        assert view is not None
        assert view.info.metadata.custom == {"mood": "calm"}


async def test_what_was_said_long_ago_is_not_kept_one_by_one(tmp_path: Path) -> None:
    limits = Limits(fold_records=20)
    async with connect(tmp_path, limits=limits, autosave=None, shutdown=QUIET) as sessions:
        folds: list[object] = []
        sessions.on("folded", folds.append)
        session = await sessions.open("a", owner="ada")
        tracemalloc.start()
        try:
            for title in range(200):
                session.describe(title=f"title {title}", number=f"{title:3}" * 1000)
                if title % 40 == 39:
                    await session.save()
                    with anyio.fail_after(10):
                        while len(folds) <= title // 40:
                            await anyio.sleep(0.001)
            gc.collect()
            snapshot = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        # Modules that are first imported meanwhile are memory, too: only its own is counted.
        own = snapshot.filter_traces(
            [tracemalloc.Filter(True, f"{Path(perdure.__file__).parent}/*")]
        )
        assert sum(trace.size for trace in own.traces) < 100 * 4000
        await session.aclose()
        assert session.info.metadata.title == "title 199"
    async with connect(tmp_path, shutdown=QUIET) as sessions, sessions.open("a") as session:
        assert session.info.metadata.title == "title 199"
        assert session.info.metadata.owner == "ada"


async def test_write_through_needs_no_save(again: Connect) -> None:
    async with again(autosave=Autosave.write_through()) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("x"))
            await session.wait_durable()
            assert session.unsaved_age == 0


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
async def test_a_dict_of_a_role_and_text_is_a_message(again: Connect, role: str) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.append({"role": role, "content": "hello"})
        await sessions.post("a", {"role": role, "content": "posted"})
    async with again() as sessions, sessions.open("a") as session:
        assert [(one.role, one.content) for one in session.context()] == [
            (role, "hello"),
            (role, "posted"),
        ]


@pytest.mark.parametrize(
    "given",
    [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "model", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "parts": [{"text": "x"}]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"a": 1},
    ],
)
async def test_a_dict_that_formats_read_differently_is_refused_and_extend_is_named(
    again: Connect, given: dict[str, object]
) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(NotStorableError, match=r"session\.extend\(\[…\], \"openai\"\)"):
            session.append(Message.user("x"), given)
        assert session.context() == []
