"""What people write, and what it is sealed with, stands in the store and nowhere else.

A run that fails in every way is watched as a whole: logs at their most talkative, errors with
their tracebacks, what objects say of themselves, and the files of an encrypted store.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown, ToolCall, ToolResult
from perdure.stores.file import FileStore
from perdure.stores.wrapped import EncryptedStore
from perdure.testing.faulty import FaultyStore, How

pytestmark = pytest.mark.deep

CANARY = "canary-7f3a91"
KEY = "c0ffee" * 10 + "abcd"


class Told:
    """What was told to people."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def error(self, error: BaseException) -> None:
        self.texts += [repr(error), str(error), repr(getattr(error, "facts", None))]
        self.texts += traceback.format_exception(error)


def values() -> list[Message]:
    return [
        Message.user(CANARY),
        Message(role="assistant", tool_calls=(ToolCall("1", "tool", {CANARY: CANARY}),)),
        Message(role="tool", tool_result=ToolResult("1", "tool", {"x": CANARY}, CANARY)),
    ]


def unstorable() -> list[Message]:
    return [
        Message.user(CANARY + "\ud800"),
        Message(role="tool", tool_result=ToolResult("1", "tool", {"key": object(), "x": CANARY})),
        Message(role="tool", tool_result=ToolResult("1", "tool", {"x": {1: CANARY}})),
        Message.user(CANARY * 2_000_000),
    ]


async def fail(store: FaultyStore, told: Told) -> None:
    sealed = EncryptedStore(store, KEY)
    shutdown = Shutdown(deadline=0.05, turn_grace=0, hard_grace=0.05, signals=False)
    try:
        async with perdure.connect(sealed, shutdown=shutdown) as sessions:
            session = await sessions.open("ada")
            session.append(*values())
            with anyio.move_on_after(0.05):
                await session.save()
            for message in unstorable():
                try:
                    session.append(message)
                except perdure.PerdureError as error:
                    told.error(error)
            told.texts += [repr(sessions), repr(session), repr(session.info), repr(sealed)]
            told.texts += [sealed.location, repr(sessions.health())]
    except perdure.PerdureError as error:
        told.error(error)


@pytest.mark.parametrize("how", ["in_doubt_applied", "permanent", "conflict"])
async def test_a_run_that_fails_tells_no_content(
    how: How, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S17, S18: no content, no key, and nothing plain on the disk."""
    caplog.set_level(logging.DEBUG)
    told = Told()
    root = tmp_path / "store"
    await fail(FaultyStore(FileStore(root), fail_on="append_many", how=how, times=None), told)
    await fail(FaultyStore(FileStore(root), fail_on="append_many", nth=10**9), told)
    for path in sorted(root.glob("agents/ada/**/*")):
        if path.is_file() and path.stat().st_size:
            path.write_bytes(path.read_bytes()[:-40] + b"damaged" + b"." * 33)
    await fail(FaultyStore(FileStore(root), fail_on="append_many", nth=10**9), told)
    for record in caplog.records:
        told.texts.append(f"{record.getMessage()} {record.__dict__} {record.exc_text}")
    texts = [caplog.text, *told.texts]
    assert len(told.texts) > 10
    assert [text for text in texts if CANARY in text or KEY in text] == []
    plain = [CANARY.encode(), KEY.encode(), bytes.fromhex(KEY)]
    files = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert files
    assert [name for name, data in files.items() if any(text in data for text in plain)] == []
