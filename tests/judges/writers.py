"""Programs that write a store while others judge it: everything that changes what a session is."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message, Retention, Session, SessionManager, ToolCall
from perdure.agent.requests import claimed
from perdure.archive import Archives
from perdure.errors import PerdureError
from perdure.records.messages import ToolResult
from tests.images import part, png

FAMILIES = ("ada", "bob", "cyd", "dan")
"""Each is written by a task of its own, so that what goes wrong is not two of them meeting."""
LARGE = 30_000
"""Bytes of what is stored apart from its record or document."""


def large(dice: random.Random) -> str:
    return dice.randbytes(LARGE // 2).hex()


async def talk(session: Session, dice: random.Random, *, turns: int = 1) -> None:
    """Have turns, with memory, a state, and a tool whose result is large."""
    for _ in range(turns):
        number = dice.getrandbits(32)
        call = ToolCall(f"call-{number}", "look", {"n": number})
        async with session.turn():
            session.append(Message.user(f"question {number}"))
            session.append(Message.assistant("", tool_calls=[call]))
            result = ToolResult(call.id, "look", large(dice))
            kept = await claimed(result, session, max_inline_bytes=1000)
            session.append(Message(role="tool", tool_result=kept))
            session.memory.set(f"key {dice.randrange(4)}", large(dice))
            session.state.set("app", {"n": number})
            session.append(Message.assistant(f"answer {number}"))


async def checkpoint(session: Session, dice: random.Random) -> None:
    """Make a checkpoint of the session, or with a state of its own; prune old ones at times."""
    if dice.random() < 0.3:
        await session.checkpoints.create("of itself")
    else:
        pad = large(dice)
        await session.checkpoints.create("given", state={"n": dice.random(), "pad": [pad] * 3})
    if dice.random() < 0.4:
        await session.checkpoints.prune(keep=2)


async def archive(session: Session, dice: random.Random) -> None:
    """Archive a home folder."""
    with tempfile.TemporaryDirectory() as home:
        for name in ("notes.txt", "work/data.bin"):
            path = Path(home, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(dice.randbytes(LARGE))
        await Archives(session, home).save(keep=2)


async def write(sessions: SessionManager, family: str, dice: random.Random) -> None:
    """Change the sessions of a family, one after the other, without a pause."""
    ids = [family]
    count = 0
    while True:
        id, count = dice.choice(ids), count + 1
        act = dice.choice("ttttcccaphfkrdgo")
        with contextlib.suppress(PerdureError):
            if act in "tca":
                does: Any = {"t": talk, "c": checkpoint, "a": archive}[act]
                async with sessions.open(id) as session:
                    await does(session, dice)
            elif act == "p":
                await sessions.prune(Retention(keep_turns=dice.randrange(3)), id=id)
            elif act == "h":
                async with sessions.open(id) as session:
                    last = await session.checkpoints.latest()
                    if last is not None:
                        await session.checkpoints.rollback(last.id)
            elif act == "o":
                await sessions.post(id, Message.user("posted"), key=f"op-{count}")
            elif act in "fkr" and len(ids) < 4 and (act != "r" or id != family):
                made = f"{family}-{count}"
                change = {"f": sessions.fork, "k": sessions.copy, "r": sessions.rename}[act]
                await change(id, made)
                ids = [*ids, made] if act != "r" else [*(set(ids) - {id}), made]
            elif act in "dg" and id != family:
                ids.remove(id)
                await (sessions.forget(id=id) if act == "g" else sessions.delete(id))
        await anyio.sleep(dice.random() * 0.02)


async def write_all(url: str, seed: int) -> None:
    """Write a store, until this process is killed."""
    async with perdure.connect(url) as sessions, anyio.create_task_group() as group:
        for family in FAMILIES:
            group.start_soon(write, sessions, family, random.Random(f"{seed} {family}"))
        print("writing", os.getpid(), flush=True)


async def fill(url: str, seed: int = 0) -> None:
    """Make sound sessions that reach blobs in every way: one is pruned, one a copy."""
    dice = random.Random(seed)
    async with perdure.connect(url) as sessions:
        async with sessions.open("plain") as session:
            session.append(Message.user("hello"))
        for id in ("ada", "pruned"):
            async with sessions.open(id) as session:
                session.append(Message.user([part(png(70_000))]))
                await talk(session, dice, turns=3)
                await session.checkpoints.create("small", state={"n": 1})
                pad = [large(dice) for _ in range(12)]
                await session.checkpoints.create("large", state={"pad": pad})
                await archive(session, dice)
        await sessions.prune(Retention(keep_turns=1), id="pruned")
        await sessions.copy("plain", "copied")
