"""Values of SDKs that are larger than a record: `perdure.adapters.claims`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure
from perdure import CorruptRecordError, Message, SessionManager, TooLargeError
from perdure.adapters import PerdureSession
from perdure.cli.check import Audit, audit, collect, garbage
from perdure.session.internals import store_below
from perdure.store import Capabilities
from perdure.stores.delegate import DelegatingStore
from perdure.stores.wrapped import EncryptedStore
from perdure.testing import MemoryStore

SIZE = 17 * 1024 * 1024
LARGE = {"role": "user", "content": "x" * SIZE}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "half \ud83d" + "y" * SIZE}
SMALL = {"role": "assistant", "content": "seen"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio alone."""
    return "asyncio"


@pytest.fixture(params=["sqlite", "file", "encrypted"])
async def sessions(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionManager]:
    store: Any = {
        "sqlite": f"sqlite:///{tmp_path}/a.db",
        "file": tmp_path / "store",
        "encrypted": None,
    }[request.param]
    if store is None:
        store = EncryptedStore(perdure.store_for(tmp_path / "store"), bytes(32))
    async with perdure.connect(store) as manager:
        yield manager


async def audited(sessions: SessionManager) -> list[Audit]:
    store = store_below(sessions)
    return [await audit(store, listed.key) for listed in await store.sessions()]


async def swept(sessions: SessionManager) -> None:
    """Remove all blobs that nothing needs, as `perdure check --gc` does."""
    store = store_below(sessions)
    there = set(await store.blob_names(""))
    found, reached = await garbage(store, "", there, await audited(sessions))
    for _ in range(2):
        await collect(store, found, reached, 0.0)


@pytest.mark.deep
async def test_a_large_item_is_read_popped_replaced_and_kept_by_all_that_removes(
    sessions: SessionManager,
) -> None:
    async with PerdureSession("a", sessions) as session:
        await session.add_items([LARGE, SMALL, OUTPUT])
        assert await session.get_items() == [LARGE, SMALL, OUTPUT]
        assert await session.pop_item() == OUTPUT
        await session.add_items([OUTPUT])
    await sessions.fork("a", "b")
    await swept(sessions)
    assert not [problem for each in await audited(sessions) for problem in each.problems]
    for name in ("a", "b"):
        assert await PerdureSession(name, sessions).get_items() == [LARGE, SMALL, OUTPUT]
    await sessions.delete("a")
    await swept(sessions)
    async with PerdureSession("b", sessions) as session:
        assert await session.replace_items([OUTPUT], expected=[LARGE, SMALL, OUTPUT])
        assert await session.get_items() == [OUTPUT]
    view = await sessions.load("b")
    assert view is not None
    assert [message.text for message in view.context()] == ["[17.0 MB, kept apart]"]
    assert len(view.context("anthropic").messages[0]["content"]) < 100


async def test_a_lost_blob_of_an_item_is_a_problem_and_is_named(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "store") as sessions:
        await PerdureSession("a", sessions).add_items([LARGE, SMALL, SMALL])
        store = store_below(sessions)
        names = await store.blob_names("")
        await store.remove_blobs("", names[:1])
        ((problem, *_),) = [each.problems for each in await audited(sessions)]
        assert names[0] in problem.detail
        with pytest.raises(CorruptRecordError, match=f"session a: blob {names[0]} is missing"):
            await PerdureSession("a", sessions).get_items()
        assert await PerdureSession("a", sessions).get_items(1) == [SMALL]


@pytest.mark.parametrize("names", [["a" * 64] * 65, ["../../secret"]])
async def test_a_message_that_names_blobs_as_no_claim_does_is_refused(names: list[str]) -> None:
    about = msgspec.json.encode({"sdk": "openai-agents", "v": 2, "claim": names})
    async with perdure.connect("memory:") as sessions, sessions.open("a") as session:
        session.append(Message(role="user", extra={"perdure_foreign": msgspec.Raw(about)}))
        await session.save()
        with pytest.raises(CorruptRecordError, match="session a: a record names blobs"):
            await PerdureSession("a", sessions).get_items()


class Plain(DelegatingStore):
    """A store that keeps no blobs."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, blobs=False)


async def test_without_blobs_what_is_too_large_is_named_and_nothing_is_stored() -> None:
    async with perdure.connect(Plain(MemoryStore())) as sessions:
        session = PerdureSession("a", sessions)
        with pytest.raises(TooLargeError, match=r"items\[1\]: .* the limit is"):
            await session.add_items([SMALL, LARGE])
        assert await session.get_items() == []
