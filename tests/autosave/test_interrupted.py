"""A Ctrl-C amid answers: none of them is taken for that of another save."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure import Message, Session, Shutdown, connect
from perdure.stores.file.log import LogWriter


def test_an_answer_that_a_ctrl_c_interrupts_acknowledges_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, append = threading.Event(), LogWriter.append
    may_write.set()
    monkeypatch.setattr(
        LogWriter, "append", lambda writer, batch: may_write.wait() and append(writer, batch)
    )
    sessions = connect(tmp_path / "store", shutdown=Shutdown(signals=False))
    struck: list[object] = []

    def strike(_: object, durable: object) -> None:
        struck.append(durable)
        if len(struck) == 1:
            raise KeyboardInterrupt

    async def begin() -> Session:
        await sessions
        return await sessions.open("ada")

    async def go_on(session: Session) -> None:
        session.append(Message.user("one"))
        await session.save()
        may_write.clear()
        session.append(Message.user("two"))
        await session.save()

    async def end() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.3)
        assert session.durable_version < session.version
        may_write.set()
        await task
        assert session.durable_version == session.version
        await sessions.aclose()

    loop = asyncio.new_event_loop()
    try:
        session = loop.run_until_complete(begin())
        session._tracked.heard_by = SimpleNamespace(captured=bool, saved=strike)
        task = loop.create_task(go_on(session))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        loop.run_until_complete(end())
    finally:
        may_write.set()
        loop.close()
