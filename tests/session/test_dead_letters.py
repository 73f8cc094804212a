"""What cannot be delivered: tried again later and later, then set aside, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import perdure
from perdure import ConfigError, LeaseOptions, Limits, Message, SessionManager, Shutdown
from perdure.records.keys import SessionKey
from perdure.session.inbox import LONGEST_PAUSE, PAUSE, TRIES
from perdure.session.session import Session
from perdure.store import PendingItem
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.wrapped import EncryptedStore, MasterKeys
from perdure.testing.faulty import FaultyStore
from tests._virtual import BACKENDS, virtual

pytestmark = pytest.mark.anyio

KEY = SessionKey("a")
SMALL = Limits(record_bytes=2000)
LARGE = "x" * 3000
OPTIONS: dict[str, Any] = {
    "shutdown": Shutdown(signals=False),
    "lease": LeaseOptions(heartbeat=2, ttl=9),
}
LONG = sum(min(LONGEST_PAUSE, PAUSE * 2**n) for n in range(TRIES)) + 1
"""Seconds within which everything that is refused is set aside."""


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: Any) -> Any:
    return virtual(request.param)


@pytest.fixture
def backing() -> MemoryBacking:
    return MemoryBacking()


@pytest.fixture
def connect(backing: MemoryBacking) -> Callable[..., SessionManager]:
    """Connect to the test's one place."""

    def make(store: Any = None, **options: Any) -> SessionManager:
        return perdure.connect(store or MemoryStore(backing=backing), **{**OPTIONS, **options})

    return make


def texts(session: Session) -> list[str]:
    return [message.text for message in session.context()]


async def test_a_store_that_fails_is_asked_later_and_later(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    store = FaultyStore(MemoryStore(backing=backing), fail_on="receive", times=None)
    async with connect(store) as sessions:
        session = await sessions.open("a")
        await sessions.post("a", Message.user("one"), key="one")
        await anyio.sleep(60)
        tries = store.calls["receive"]
        assert 5 < tries < 60, "more often than the pauses allow"
        health = sessions.health()
        assert health.status == "degraded"
        assert "a" in health.undelivered
        assert any("session a: posts cannot be taken" in why for why in health.reasons)
        await anyio.sleep(600)
        assert store.calls["receive"] - tries < 600 / LONGEST_PAUSE * 4
        for number in range(50):  # posts that come meanwhile do not hurry it
            await sessions.post("a", Message.user("more"), key=f"more-{number}")
            await anyio.sleep(0.1)
        assert store.calls["receive"] - tries < 600 / LONGEST_PAUSE * 4 + 10
        store.mend()
        await anyio.sleep(LONGEST_PAUSE + 1)
        assert texts(session) == ["one", *["more"] * 50]
        health = sessions.health()
        assert (health.status, health.undelivered) == ("ok", {})
        await sessions.post("a", Message.user("last"), key="last")
        await anyio.sleep(0.1)  # the pauses begin anew
        assert texts(session)[-1] == "last"


async def test_what_is_refused_each_time_becomes_a_dead_letter(
    connect: Callable[..., SessionManager],
) -> None:
    async with connect() as one:
        await one.post("a", Message.user("first"), key="first")
        await one.post("a", Message.user("beside"), Message.user(LARGE), key="large")
        await one.post("a", Message.user("behind"), key="behind")
    async with connect(limits=SMALL) as two:
        session = await two.open("a")
        assert texts(session) == ["first", "behind"]
        assert two.health().status == "degraded"
        assert await two.dead_letters("a") == ()
        await anyio.sleep(LONG)
        letters = await two.dead_letters("a")
        assert [letter.item.op_id for letter in letters] == ["large/0", "large/1"]
        assert {letter.tries for letter in letters} == {TRIES}
        assert all("over the limit of 2000" in letter.reason for letter in letters)
        assert LARGE.encode() in letters[1].item.payload
        health = two.health()
        assert (health.status, health.dead_letters) == ("ok", {"a": 2})
        await two.post("a", Message.user("later"), key="later")
        await anyio.sleep(1)
        assert texts(session) == ["first", "behind", "later"]
    async with connect() as three:  # they outlast restarts, and nothing takes them by itself
        session = await three.open("a")
        await anyio.sleep(60)
        assert texts(session) == ["first", "behind", "later"]
        assert await three.dead_letters("a") == letters
        assert await three.retry_dead_letters("a", ["large"]) == 2
        await anyio.sleep(1)
        assert texts(session) == ["first", "behind", "later", "beside", LARGE]
        assert await three.dead_letters("a") == ()


async def test_however_many_are_refused_those_behind_them_come(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    async with connect() as one:
        for number in range(150):
            await one.post("a", Message.user(LARGE), key=f"large-{number}")
        many = [Message.user(str(number)) for number in range(130)]
        await one.post("a", *many, key="many")
        await one.post("a", Message.user("behind"), key="behind")
    async with connect(limits=SMALL) as two:
        session = await two.open("a")
        await anyio.sleep(1)
        assert texts(session)[-131:] == [*map(str, range(130)), "behind"]
        await anyio.sleep(LONG)
        assert len(await two.dead_letters("a")) == 150
        assert backing.sessions[KEY].inbox == {}


async def test_a_letter_is_retried_once_whatever_fails_in_between(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    async with connect() as one:
        await one.post("a", Message.user(LARGE), key="large")
    async with connect(limits=SMALL) as two:
        await two.open("a")
        await anyio.sleep(LONG)
    failing = FaultyStore(MemoryStore(backing=backing), fail_on="ack")
    async with connect(failing) as three:
        session = await three.open("a")
        with pytest.raises(perdure.StoreUnavailableError):
            await three.retry_dead_letters("a")
        await anyio.sleep(1)
        assert await three.retry_dead_letters("a") == 1
        await anyio.sleep(1)
        assert texts(session) == [LARGE]


@pytest.mark.parametrize("how", ["transient", "in_doubt_applied"])
async def test_a_failure_while_setting_aside_loses_nothing(
    how: Any, backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    async with connect() as one:
        await one.post("a", Message.user(LARGE), key="large")
        await one.post("a", Message.user("behind"), key="behind")
    store = FaultyStore(MemoryStore(backing=backing), fail_on="ack", nth=2, how=how)
    async with connect(store, limits=SMALL) as two:
        session = await two.open("a")
        await anyio.sleep(LONG + LONGEST_PAUSE)
        assert store.injected == 1
        assert [letter.item.key for letter in await two.dead_letters("a")] == ["large"]
        assert texts(session) == ["behind"]
        assert two.health().status == "ok"


async def test_what_no_decoder_reads_is_refused(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    raw = MemoryStore(backing=backing)
    bad = [
        PendingItem("message/0", "message", b'{"role":7}', 1.0),
        PendingItem("broken/0", "app:note", b'{"torn', 1.0),
    ]
    await raw.enqueue(KEY, bad)
    async with connect() as sessions:
        await sessions.post("a", Message.user("good"), key="good")
        session = await sessions.open("a")
        await anyio.sleep(LONG)
        assert texts(session) == ["good"]
        letters = await sessions.dead_letters("a")
        payloads = {letter.item.payload for letter in letters}
        assert payloads == {b'{"torn', b'{"role":7}'}
        assert all("cannot be decoded" in letter.reason for letter in letters)


async def test_what_another_key_sealed_is_set_aside_and_retried_once_it_can_be_read(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    keys = MasterKeys(MasterKeys.new())

    def sealed() -> EncryptedStore:
        return EncryptedStore(MemoryStore(backing=backing), keys)

    async with connect(sealed()) as sessions:
        await sessions.open("a")
    plain = PendingItem("plain/0", "message", b'{"role":"user","content":"PLAIN"}', 1.0)
    await MemoryStore(backing=backing).enqueue(KEY, [plain])  # past the keys
    async with connect(sealed()) as sessions:
        await sessions.post("a", Message.user("good"), key="good")
        session = await sessions.open("a")
        assert texts(session) == ["good"]
        await anyio.sleep(LONG)
        (letter,) = await sessions.dead_letters("a")
        assert letter.item.payload == plain.payload
        with pytest.raises(ConfigError, match="cannot be read, so trying again would not help"):
            await sessions.retry_dead_letters("a")
        (kept,) = backing.sessions[KEY].dead_letters.values()
        assert b"PLAIN" not in kept.item.payload
        assert await sessions.drop_dead_letters("a", ["plain"]) == 1
        assert await sessions.dead_letters("a") == ()


async def test_a_key_without_a_letter_is_named(connect: Callable[..., SessionManager]) -> None:
    async with connect() as sessions:
        await sessions.open("a")
        for act in (sessions.retry_dead_letters, sessions.drop_dead_letters):
            with pytest.raises(ConfigError, match="no dead letter 'k'"):
                await act("a", ["k"])
            assert await act("a") == 0


async def test_deleting_and_renaming(
    backing: MemoryBacking, connect: Callable[..., SessionManager]
) -> None:
    async with connect() as one:
        for name in ("a", "b"):
            await one.post(name, Message.user(LARGE), key="large")
    async with connect(limits=SMALL) as two:
        for name in ("a", "b"):
            await two.open(name)
        await anyio.sleep(LONG)
        before = await two.dead_letters("a")
        await two.rename("a", "c")
        assert await two.dead_letters("a") == ()
        assert await two.dead_letters("c") == before
        await two.delete("b")
        assert await two.dead_letters("b") == ()
        assert await MemoryStore(backing=backing).sessions_with_pending_items(
            dead_letters=True
        ) == [SessionKey("c")]
