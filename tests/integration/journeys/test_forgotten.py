"""What was forgotten is found nowhere: not in the store, not in the files that it keeps."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import perdure
from perdure import Message
from perdure.store import Store
from tests.integration.journeys.backends import ALL, store_of
from tests.integration.journeys.traces import is_found, objects, traces

pytestmark = pytest.mark.deep

REMNANTS = {
    "postgres": "pg_wal/",  # until the segment is written over
    "s3": "perdure-tests_",  # the volume, until the server compacts it
}
"""Where a server keeps what it was told to remove; docs/durability.md says so."""


async def tell(store: Store, word: str) -> None:
    """Make a session that has the word wherever one can put it, and a fork that has it not."""
    async with perdure.connect(store) as sessions:
        session = await sessions.open("told", owner="o")
        async with session.turn():
            session.append(Message.user("shared"))
        await sessions.fork("told", "fork")
        session.describe(title=f"title {word}", tags=[f"tag {word}"])
        async with session.turn():
            session.append(Message.user(word), Message.assistant(word * 3))
            session.memory.set("small", word)
            session.memory.set("large", word + secrets.token_hex(20_000))
            session.state.set("app", {"of": word})
        await session.aclose()
        await sessions.post("told", Message.user(f"posted {word}"))
        async with sessions.open("other") as other:
            other.append(Message.user("other"))


@pytest.mark.parametrize("kind", ALL)
async def test_nothing_of_a_forgotten_session_is_left_and_its_fork_opens(
    kind: str, tmp_path: Path
) -> None:
    word = f"canary{secrets.token_hex(8)}"
    await tell(store_of(kind, tmp_path), word)
    assert is_found(kind, tmp_path, word) == ("+" not in kind)
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        report = await sessions.forget(id="told")
        assert (len(report.sessions), report.blobs) == (1, 1)
        assert report.records > 0
    left = traces(kind, tmp_path, word)
    allowed = REMNANTS.get(kind)
    assert [one for one in left if allowed is None or not one.startswith(allowed)] == []
    assert objects(kind, tmp_path, word) == []
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        assert await sessions.load("told") is None
        assert [info.key.agent for info in await sessions.list()] == ["fork", "other"]
        async with sessions.open("fork") as fork:
            assert [message.text for message in fork.context()] == ["shared"]
        async with sessions.open("told") as again, again.turn():
            assert again.context() == []
        async with sessions.open("other") as other:
            assert [message.text for message in other.context()] == ["other"]
