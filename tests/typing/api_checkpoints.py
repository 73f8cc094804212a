"""Code that type checkers must accept: how people use checkpoints. It is checked, never run."""

# pyright: strict
from __future__ import annotations

from typing import Any, assert_type

import perdure.sync
from perdure import Session, SessionManager, SessionView
from perdure.checkpoints import (
    CapturedState,
    ChainProblem,
    Checkpoint,
    CheckpointEngine,
    CheckpointReader,
    CheckpointState,
    Difference,
    ExplicitState,
    KernelEvent,
    KernelEventReader,
    KernelEventStream,
    RolledBack,
    ValueChange,
    Verification,
)


async def making(session: Session, sessions: SessionManager) -> None:
    checkpoints: CheckpointEngine = session.checkpoints
    made = await checkpoints.create("before the trial")
    assert_type(made, Checkpoint)
    assert_type(await checkpoints.create("mine", {"any": ["json"]}), Checkpoint)
    assert_type((made.id, made.label, made.timestamp), tuple[int, str, int])
    assert_type(made.state, CapturedState | ExplicitState)
    await sessions.fork("mia", "eve", at=made)


async def looking(view: SessionView) -> None:
    checkpoints: CheckpointReader = view.checkpoints
    assert_type(await checkpoints.latest(), Checkpoint | None)
    assert_type(await checkpoints.states(), list[Checkpoint])
    restored = await checkpoints.restore(3)
    assert_type(restored, CheckpointState | None)
    if restored is not None:
        assert_type(restored.state, Any)
    found = await checkpoints.diff(1, 2)
    assert_type(found, Difference)
    assert_type(found.changed, dict[str, ValueChange])
    verified = await checkpoints.verify()
    assert_type(verified, Verification)
    assert_type(verified.problems, tuple[ChainProblem, ...])
    events: KernelEventReader = view.events
    assert_type(await events.read(after=7), list[KernelEvent])


async def going_back(session: Session) -> None:
    back = await session.checkpoints.rollback(1, replay=True)
    assert_type(back, RolledBack)
    assert_type(back.events, tuple[KernelEvent, ...])
    async with session.checkpoints.guard("trial") as checkpoint:
        assert_type(checkpoint, Checkpoint)
    assert_type(await session.checkpoints.prune(keep=10), tuple[int, ...])
    await session.checkpoints.prune(keep=[1, 5])


def happening(session: Session) -> None:
    events: KernelEventStream = session.events
    assert_type(events.emit("custom", "plan", {"goal": "draft"}), KernelEvent)


def blocking(session: perdure.sync.Session, view: perdure.sync.SessionView) -> None:
    checkpoints: perdure.sync.CheckpointEngine = session.checkpoints
    with checkpoints.guard("trial") as made:
        assert_type(made, Checkpoint)
    reader: perdure.sync.CheckpointReader = view.checkpoints
    assert_type(reader.states(), list[Checkpoint])
    stream: perdure.sync.KernelEventStream = session.events
    assert_type(stream.emit("custom"), KernelEvent)
    events: perdure.sync.KernelEventReader = view.events
    assert_type(events.read(), list[KernelEvent])
