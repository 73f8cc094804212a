"""Code that type checkers must accept: how people use `perdure.testing`. It is never run."""

# pyright: strict
from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pytest

from perdure import Limits, Session, SessionManager
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.testing import (
    Crash,
    EchoModel,
    Faults,
    FaultyStore,
    How,
    ManualClock,
    MemoryBacking,
    MemoryStore,
    Sandbox,
    SandboxOptions,
    ScriptedModel,
    SwitchedStore,
    assert_saved,
    call,
    conformance,
    wait_saved,
)
from perdure.testing.plugin import MakeModel, ReopenSession

HOW: How = "in_doubt_applied"


class TestMyStore(conformance.StoreConformance):
    def make_store(self, place: Path, owner: str) -> Store:
        return FileStore(place, owner=owner)


@pytest.fixture
def perdure_options() -> SandboxOptions:
    return {"limits": Limits(loads=1), "autosave": None}


async def fixtures(
    perdure_sandbox: Sandbox,
    perdure_sessions: SessionManager,
    perdure_store: SwitchedStore,
    perdure_clock: ManualClock,
    perdure_reopen: ReopenSession,
    perdure_scripted_model: MakeModel,
) -> None:
    assert_type(perdure_sandbox.sessions, SessionManager)
    assert_type(perdure_sandbox.clock, ManualClock | None)
    session: Session = await perdure_sessions.open("mia")
    perdure_store.down()
    perdure_store.up()
    perdure_store.fail_next("head", how=HOW, times=2)
    perdure_store.fail_next(None)
    await perdure_clock.advance(30)
    assert_type(perdure_clock(), float)
    assert_saved(session)
    await wait_saved(session, session, timeout=1)
    assert_type(await perdure_reopen(), SessionManager)
    assert_type(await perdure_reopen(crash=False), SessionManager)
    assert_type(perdure_scripted_model("Hello.", call("add", a=1)), ScriptedModel)
    assert_type(perdure_scripted_model(), ScriptedModel)


async def without_pytest() -> None:
    backing = MemoryBacking()
    async with Sandbox(store=lambda: MemoryStore(backing=backing), limits=Limits()) as sandbox:
        assert_type(await sandbox.reopen(), SessionManager)
        assert_type(sandbox.store, SwitchedStore)
    shared = Faults()  # stores that share it go down together
    SwitchedStore(MemoryStore(backing=backing), faults=shared)


async def faults(store: Store) -> None:
    faulty: Store = FaultyStore(store, fail_on="append_many", nth=3, how="crash")
    try:
        await faulty.open()
    except Crash:
        assert_type(EchoModel(), ScriptedModel)
