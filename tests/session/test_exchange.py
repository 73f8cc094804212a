"""An import that fails leaves nothing behind, though it had begun."""

from __future__ import annotations

import pytest

from perdure import Message, Shutdown, TooLargeError, connect, export_state, import_state
from perdure.session.options import Limits
from perdure.stores.memory import MemoryStore
from tests.session.conftest import Connect
from tests.session.lives import said

pytestmark = pytest.mark.anyio


async def test_an_import_with_a_record_that_is_too_large_leaves_no_part_of_itself(
    again: Connect,
) -> None:
    quiet = Shutdown(signals=False)
    async with connect(MemoryStore(), shutdown=quiet) as theirs:
        session = await theirs.open("a")
        for size in (10, 5000, 10):
            session.append(Message.user("x" * size))
        state = await export_state(theirs, "a")
    assert state is not None
    async with again(limits=Limits(record_bytes=1000)) as sessions:
        with pytest.raises(TooLargeError, match="5"):
            await import_state(sessions, state)
        assert not await sessions.exists("a")
    async with again() as sessions:
        await import_state(sessions, state)
        view = await sessions.load("a")
        assert [len(text) for text in said(view)] == [10, 5000, 10]
