"""Encrypted and compressed stores of an earlier release are read, gone on with and checked.

Each holds `ada` (media, states, large memory values, a checkpoint with a state, an archive, a post
that waits), `eve`, a fork of it that is numbered after a base, and `pruned`. In the encrypted one,
names of documents are in the clear, and blobs are under the tenant's key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Message, Shutdown, connect
from perdure.archive import Archives
from perdure.cli.check import audit
from perdure.errors import SessionError
from perdure.records.keys import SessionKey
from perdure.session.session import Session, SessionView
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from tests.golden.reader import HERE, copy_of

QUIET = Shutdown(signals=False)
AROUND: dict[str, Callable[[Store], Store]] = {
    "encrypted-2": lambda inner: EncryptedStore(inner, "5a" * 32),
    "compressed": CompressedStore,
}
ADA, EVE = SessionKey("ada"), SessionKey("eve")
ALL = (ADA, EVE, SessionKey("pruned"))


@pytest.fixture(params=AROUND)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    copy_of(HERE / request.param, tmp_path)
    return lambda: AROUND[request.param](FileStore(tmp_path / "store"))


async def require_ada(session: Session | SessionView) -> None:
    """Check what the release that wrote it put into a session, and into its fork."""
    texts = [message.text for message in session.context()]
    assert texts[0].startswith("question 0 words")
    assert session.restore_report.damaged == ()
    assert await session.state.keys() == ["a/b c", "notes"]
    assert await session.state.get("a/b c") == {"n": [1, 2]}
    assert await session.memory.get("large") == "value " * 3000
    (checkpoint,) = [one for one in await session.checkpoints.states() if one.label == "given"]
    restored = await session.checkpoints.restore(checkpoint.id)
    assert restored is not None
    assert restored.state["blob"][399] == "state 399"
    images = [part for message in session.context() for part in message.image_urls]
    parts = [m.content for m in session.context() if not isinstance(m.content, str)]
    assert len(str(images) + str(parts)) > 6000


async def problems(store: Store, *keys: SessionKey) -> list[str]:
    await store.open()
    found = [str(one) for key in keys for one in (await audit(store, key)).problems]
    await store.aclose()
    return found


async def test_an_earlier_store_is_read_and_sound(make: Callable[[], Store]) -> None:
    assert await problems(make(), *ALL) == []
    async with connect(make(), shutdown=QUIET, read_only=True) as sessions:
        for key in (ADA, EVE):
            view = await sessions.load(key.agent)
            assert view is not None
            await require_ada(view)
        view = await sessions.load("pruned")
        assert view is not None
        assert await view.state.get("kept") == {"k": 1}


async def test_an_earlier_store_is_gone_on_with(make: Callable[[], Store], tmp_path: Path) -> None:
    async with connect(make(), shutdown=QUIET) as sessions:
        assert [info.key for info in await sessions.list(owner="grace", tag="golden")]
        async with sessions.open("ada") as session:
            await require_ada(session)
            assert session.context()[-1].text == "a post that waits"
            async with session.turn():
                session.append(Message.user("I am back"))
            session.state.set("notes", {"text": "second"})
        async with sessions.open("pruned") as session, session.turn():
            session.append(Message.user("I am back"))
        with pytest.raises(SessionError, match="perdure migrate"):
            await sessions.open("eve")
        for source in ("ada", "eve"):
            copy = await sessions.fork(source, f"{source}-copy")
            assert copy is not None
            view = await sessions.load(f"{source}-copy")
            assert view is not None
            await require_ada(view)
        async with sessions.open("ada-copy") as session:
            (tmp_path / "home").mkdir()
            await Archives(session, tmp_path / "home").restore()
            text = (tmp_path / "home" / "notes" / "a.txt").read_text()
            assert text.startswith("a file of the home")
    copies = SessionKey("ada-copy"), SessionKey("eve-copy")
    assert await problems(make(), *ALL, *copies) == []


async def test_no_name_of_a_document_is_in_the_clear_after_the_next_fold(tmp_path: Path) -> None:
    root = copy_of(HERE / "encrypted-2", tmp_path)
    make = AROUND["encrypted-2"]
    assert (root / "agents" / "ada" / "state" / "notes.json").exists()
    async with connect(make(FileStore(root)), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("folded"))
    names = [path.name for path in (root / "agents" / "ada" / "state").rglob("*.json")]
    assert len(names) == 2
    assert all(name.startswith("x") for name in names)
    async with connect(make(FileStore(root)), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            await require_ada(session)
