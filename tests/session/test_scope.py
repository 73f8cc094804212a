"""Scopes: values that many sessions share, in one process and in several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

import perdure
import perdure.sync
from perdure import (
    InvalidArgumentError,
    Limits,
    Message,
    NotStorableError,
    SessionManager,
    Shutdown,
    TooLargeError,
)

QUIET = Shutdown(signals=False)
Connect = Callable[..., SessionManager]


@pytest.fixture(params=["file", "sqlite"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    url = f"sqlite:///{tmp_path}/x.db" if request.param == "sqlite" else tmp_path / "kept"
    return lambda **options: perdure.connect(url, shutdown=QUIET, **options)


async def test_what_one_session_stores_another_one_reads_and_the_next_process(
    connect: Connect,
) -> None:
    async with connect() as sessions:
        ada = sessions.scope("user:ada")
        assert (await ada.values(), await ada.get("theme", "light")) == ({}, "light")
        await ada.set("theme", "dark")
        await ada.update({"a": 1, "big": "x" * 5000}, delete=["theme", "nothing"])
        assert await sessions.scope("user:ada").values() == {"a": 1, "big": "x" * 5000}
        assert await sessions.scope("user:bob").values() == {}
        assert await sessions.scope("user:ada", tenant="t").values() == {}
    async with connect() as sessions:
        assert await sessions.scope("user:ada").values("b") == {"big": "x" * 5000}


async def test_an_edit_is_stored_whole_or_not_at_all(connect: Connect) -> None:
    async with connect() as sessions:
        scope = sessions.scope("app")
        async with scope.edit() as values:
            values["a"] = {"n": [1]}
            values["b"] = True
        with pytest.raises(KeyError):
            async with scope.edit() as values:
                values["a"]["n"].append(2)
                values["none"]  # noqa: B018
        with pytest.raises(NotStorableError):
            async with scope.edit() as values:
                values["c"], values["d"] = 1, object()
        with pytest.raises(NotStorableError):
            await scope.update({"c": 1, "d": object()})
        with pytest.raises(InvalidArgumentError, match="'c' does not begin"):
            async with scope.edit("b") as values:
                values["c"] = 1
        assert await scope.values() == {"a": {"n": [1]}, "b": True}
        async with scope.edit("b") as values:
            assert values == {"b": True}
            values["b"] = 1
        assert await scope.get("b") is not True
        async with scope.edit() as values:
            del values["a"]
        changes = await scope.history()
        assert [(one.values, one.deleted) for one in changes] == [
            ({"a": {"n": [1]}, "b": True}, ()),
            ({"b": 1}, ()),
            ({}, ("a",)),
        ]
        assert await scope.history(limit=1) == changes[2:]
        assert await scope.history(before=changes[2].seq) == changes[:2]
        assert 0 < changes[0].at <= changes[2].at


async def test_nothing_that_was_counted_at_once_is_lost(connect: Connect) -> None:
    """Two managers are two processes to a store; each has many tasks."""

    async def count(sessions: SessionManager) -> None:
        async with sessions.scope("app").edit() as values:
            values["n"] = values.get("n", 0) + 1

    async with connect() as one, connect() as two, anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(count, one)
            group.start_soon(count, two)
    async with connect() as sessions:
        assert await sessions.scope("app").get("n") == 20
        assert len(await sessions.scope("app").history(limit=99)) == 20


async def test_a_value_that_was_stored_survives_a_kill(tmp_path: Path) -> None:
    import sys

    program = """
import asyncio, os, sys, perdure
async def main():
    async with perdure.connect(sys.argv[1]) as sessions:
        await sessions.scope("user:ada").update({"a": 1, "b": 2})
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    await anyio.run_process([sys.executable, "-c", program, str(tmp_path / "kept")], check=False)
    async with perdure.connect(tmp_path / "kept", shutdown=QUIET) as sessions:
        assert await sessions.scope("user:ada").values() == {"a": 1, "b": 2}


async def test_lists_of_sessions_leave_scopes_out_and_the_other_way_round(
    connect: Connect,
) -> None:
    async with connect() as sessions:
        for name in ("a", "z"):
            async with sessions.open(name) as session, session.turn():
                session.append(Message.user("x"))
        for name in ("user:ada", "user:bob", "app"):
            await sessions.scope(name, owner=name[-3:]).set("x", 1)
    async with connect() as sessions:
        for limit in (1, 2, 100):
            ids, last = [], None
            while page := await sessions.list(after=last, limit=limit):
                ids, last = ids + [info.key.agent for info in page], page[-1]
            assert ids == ["a", "z"]
            found, last = [], None
            while page := await sessions.list_scopes(after=last, limit=limit):
                found, last = found + [info.key.session for info in page], page[-1]
            assert found == ["app", "user:ada", "user:bob"]
        (info,) = await sessions.list_scopes(prefix="user:b")
        assert (info.key.session, info.owner) == ("user:bob", "bob")
        assert [one.key.session for one in await sessions.list_scopes(owner="ada")] == ["user:ada"]
        report = await sessions.forget(owner="ada")
        assert len(report.sessions) == 1
        assert await sessions.scope("user:ada").values() == {}
        assert await sessions.scope("user:bob").forget()
        assert not await sessions.scope("user:bob").forget()
        assert [one.key.session for one in await sessions.list_scopes()] == ["app"]


async def test_no_limit_of_memory_takes_a_value_away() -> None:
    limits = Limits(memory_bytes=2000)
    async with perdure.connect("memory:", limits=limits, shutdown=QUIET) as sessions:
        scope = sessions.scope("app")
        await scope.set("a", "x" * 1500)
        with pytest.raises(TooLargeError):
            await scope.set("b", "x" * 1500)
        assert list(await scope.values()) == ["a"]


@pytest.mark.parametrize("bad", ["", "x" * 1025, "\x00"])
async def test_an_id_that_cannot_be_is_refused(bad: str) -> None:
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        with pytest.raises(InvalidArgumentError):
            sessions.scope(bad)
        with pytest.raises(InvalidArgumentError, match="key"):
            await sessions.scope("app").set("", 1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from("abc"), st.integers() | st.booleans()),
            st.tuples(st.just("delete"), st.sampled_from("abc"), st.none()),
            st.tuples(st.just("restart"), st.none(), st.none()),
        ),
        max_size=12,
    )
)
def test_a_scope_is_a_dict_that_lasts(steps: list[tuple[str, Any, Any]]) -> None:
    async def run() -> None:
        from perdure.stores.memory import MemoryBacking, MemoryStore

        backing, model = MemoryBacking(), dict[str, Any]()
        sessions = await perdure.connect(MemoryStore(backing=backing), shutdown=QUIET)
        for what, key, value in steps:
            if what == "restart":
                await sessions.aclose()
                sessions = await perdure.connect(MemoryStore(backing=backing), shutdown=QUIET)
                continue
            async with sessions.scope("app").edit() as values:
                assert values == model
                if what == "set":
                    values[key] = model[key] = value
                else:
                    values.pop(key, None)
                    model.pop(key, None)
            assert repr(await sessions.scope("app").values()) == repr(dict(sorted(model.items())))
        await sessions.aclose()

    asyncio.run(run())


def test_the_blocking_mirror_does_the_same(tmp_path: Path) -> None:
    with perdure.sync.connect(tmp_path / "kept") as sessions:
        scope = sessions.scope("user:ada")
        scope.update({"a": 1, "b": 2}, delete=["c"])
        with scope.edit() as values:
            values["a"] += 1
        with pytest.raises(ZeroDivisionError), scope.edit() as values:
            values["a"] = 1 / 0
        scope.set("c", 3)
        scope.delete("b")
        assert (scope.id, scope.values(), scope.get("a")) == ("user:ada", {"a": 2, "c": 3}, 2)
        assert [one.values for one in scope.history()] == [{"a": 1, "b": 2}, {"a": 2}, {"c": 3}, {}]
        assert len(sessions.list_scopes()) == 1
        assert scope.forget()
