"""A save that nothing else waits beside goes to the store at once, without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

from perdure.autosave.core import Core
from perdure.autosave.events import Saved, SaveFailed
from perdure.autosave.options import Autosave, EngineOptions
from perdure.errors import SessionQuarantinedError
from perdure.store import Outcome, Status
from tests.autosave.inline_store import DirectStore, Fault
from tests.autosave.rigs import CALM, PLAIN, Rig, rig, within


def direct(
    faults: Sequence[Fault] = (), engine: EngineOptions = PLAIN, **options: Any
) -> AbstractAsyncContextManager[Rig]:
    return rig(DirectStore(faults=faults, **options), engine=engine)


async def test_a_save_needs_no_worker() -> None:
    async with direct() as r:
        t = r.track()
        for count in (1, 3, 2):
            version = r.append(t, count)
            assert await r.saver.save(t) == version
        assert (r.stored(t), r.store.begun) == (6, 3)  # type: ignore[attr-defined]
        assert [event.durable for event in r.of(Saved)] == [1, 4, 6]


async def test_a_save_is_an_event_only_while_somebody_listens() -> None:
    async with direct() as r:
        t = r.track()
        for wanted in (True, False, True):
            r.saver.report_saves(wanted=wanted)
            r.append(t)
            await r.saver.save(t)
        assert [event.durable for event in r.of(Saved)] == [1, 3]


async def test_several_savers_of_a_session_take_turns() -> None:
    async with direct(latency=(0.5,)) as r:
        t = r.track()

        async def say() -> None:
            version = r.append(t)
            assert await r.saver.save(t) >= version

        async with anyio.create_task_group() as group:
            for _ in range(9):
                group.start_soon(say)
        assert r.stored(t) == 9


async def test_more_sessions_than_the_store_takes_at_once_are_all_saved() -> None:
    async with direct(latency=(0.1, 0.3), parallelism=3) as r:
        tracked = [r.track(f"s{n}") for n in range(20)]

        async def say(t: Any) -> None:
            for _ in range(4):
                version = r.append(t)
                assert await r.saver.save(t) >= version

        async with anyio.create_task_group() as group:
            for t in tracked:
                group.start_soon(say, t)
        assert [r.stored(t) for t in tracked] == [4] * 20
        assert r.store.begun == len(r.store.calls)  # type: ignore[attr-defined]  # no worker


@pytest.mark.parametrize("fault", ["down", "unacked", "lost", "raise", "hang", "hang_applied"])
async def test_what_fails_is_sent_again(fault: Fault) -> None:
    async with direct(
        [fault], engine=EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    ) as r:
        t = r.track()
        version = r.append(t, 2)
        assert await r.saver.save(t) == version
        r.append(t)
        await r.saver.save(t)
        assert (r.stored(t), t.durable) == (3, 3)
        assert len(r.of(SaveFailed)) == 1


async def test_a_caller_that_gives_up_changes_nothing() -> None:
    async with direct(latency=(3.0,)) as r:
        t = r.track()
        version = r.append(t)
        with anyio.move_on_after(1.0) as scope:
            await r.saver.save(t)
        assert scope.cancelled_caught
        assert await r.saver.wait_durable(t, version) == version
        assert len(r.store.calls) == 1


async def test_a_refused_record_puts_the_session_aside() -> None:
    async with direct() as r:
        t = r.track()
        r.append(t)
        await r.saver.save(t)
        r.store.poison.add((t.key, 2))
        r.append(t)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        assert r.stored(t) == 1


async def test_closing_waits_for_what_is_under_way() -> None:
    async with direct(latency=(2.0,)) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        report = await r.saver.aclose(within(10, 1))
        assert (report.clean, r.stored(t)) == (True, 1)


async def test_closing_does_not_wait_for_ever() -> None:
    async with direct(["hang"]) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        report = await r.saver.aclose(within(3, 1))
        assert not report.clean
        assert t.durable == 0


async def test_a_loop_that_ends_leaves_no_save_behind() -> None:
    async with direct(latency=(5.0,)) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        await r.host.aclose()
        assert t.inflight is None


async def test_an_answer_that_comes_after_a_save_was_given_up_counts_for_nothing() -> None:
    """It would be taken for the answer to what was sent again meanwhile."""
    late: list[Any] = []

    class Late(DirectStore):
        def begin_append(self, batch: Any, done: Any) -> bool:
            if late:
                return super().begin_append(batch, done)
            late.append(done)
            return True

    store = Late(latency=(3.0,))
    async with rig(store, engine=EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)) as r:
        t = r.track()
        r.append(t, 2)
        with anyio.move_on_after(7):
            await r.saver.save(t)
        assert [event.in_doubt for event in r.of(SaveFailed)] == [True]
        while not store.calls:
            await anyio.sleep(0.1)
        late[0](Outcome(Status.OK))
        assert t.durable == 0
        assert await r.saver.save(t) == 2
        assert r.stored(t) == 2
        assert await r.outlasts_an_outage()


@pytest.mark.parametrize(
    ("owner", "method", "at_entry", "is_launched"),
    [
        (Core, "capture_alone", False, False),
        (DirectStore, "begin_append", True, False),
        (DirectStore, "begin_append", True, True),
        (DirectStore, "begin_append", False, False),
        (DirectStore, "begin_append", False, True),
    ],
)
async def test_a_save_that_an_interrupt_cuts_off_is_in_doubt_and_sent_again(
    owner: type, method: str, at_entry: bool, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is captured, before the store has it, or behind that."""
    act, interrupts = getattr(owner, method), [KeyboardInterrupt("now")]

    def interrupted(*args: object) -> object:
        if not interrupts:
            return act(*args)
        if not at_entry:
            act(*args)
        raise interrupts.pop()

    monkeypatch.setattr(owner, method, interrupted)
    options = Autosave(max_records=1) if is_launched else CALM
    async with rig(DirectStore(latency=(0.1,)), engine=PLAIN, autosave=options) as r:
        t = r.track()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # either may be the one
            r.append(t)
            await r.saver.save(t)
        assert t.inflight is None
        (failed,) = r.of(SaveFailed)
        assert failed.in_doubt
        assert "KeyboardInterrupt('now') came while it was sent" in str(failed.error)
        assert await r.saver.save(t) == 1
        assert r.stored(t) == 1
        assert r.saver.health().reasons == ()
        assert await r.outlasts_an_outage()
