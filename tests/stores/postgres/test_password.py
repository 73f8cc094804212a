"""A password that changes while the store is open: each new connection asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import sniffio

import perdure
from perdure import ConfigError, Message, StoreUnavailableError
from perdure.stores.postgres import PostgresStore
from tests.servers import LONG
from tests.servers.postgres import Postgres


class Role:
    """A user of the server whose password can be changed, as a token of IAM's changes."""

    def __init__(self, server: Postgres, name: str) -> None:
        self.server = server
        self.name = name
        self.url = f"postgresql://{name}@127.0.0.1:{server.port}/postgres"
        self.asked: list[str] = []
        self.password = "first-Secret"
        server.run(f"CREATE ROLE {name} LOGIN PASSWORD '{self.password}'")
        server.run(f"GRANT CREATE ON DATABASE postgres TO {name}")

    def change(self, password: str) -> None:
        """Change the password, and end all connections that knew the one before."""
        self.server.run(f"ALTER ROLE {self.name} PASSWORD '{password}'")
        self.password = password
        self.disconnect()

    def disconnect(self) -> int:
        """End all connections, and return how many there were."""
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
        return len(self.server.run(query, self.name))

    def plain(self) -> str:
        self.asked.append(self.password)
        return self.password

    async def on_the_loop(self) -> str:
        sniffio.current_async_library()
        await anyio.sleep(0)
        return self.plain()

    def listeners(self) -> int:
        query = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND query LIKE 'LISTEN%%'"
        return int(self.server.run(query, self.name)[0][0])


@pytest.fixture
def role(server: Postgres, schema: str) -> Iterator[Role]:
    made = Role(server, schema)
    yield made
    while made.disconnect():  # whose query may still hold what is dropped now
        time.sleep(0.05)
    server.run(f"DROP OWNED BY {schema} CASCADE")
    server.run(f"DROP ROLE {schema}")


Give = Callable[[Role], Any]
GIVEN = pytest.mark.parametrize(
    "give", [lambda role: role.plain, lambda role: role.on_the_loop], ids=["plain", "async"]
)


async def until(check: Callable[[], bool]) -> None:
    with anyio.fail_after(LONG):
        while not check():  # noqa: ASYNC110  # another process tells nobody
            await anyio.sleep(0.05)


@GIVEN
async def test_every_new_connection_asks_for_the_password(give: Give, role: Role) -> None:
    store = PostgresStore(role.url, schema=role.name, password=give(role))
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        await session.save()
        await until(lambda: role.listeners() == 1)
        role.change("second-Secret")
        session.append(Message.user("Still there?"))
        await session.save()
        await until(lambda: role.listeners() == 1)  # it, too, has come back
        assert set(role.asked) == {"first-Secret", "second-Secret"}
        async with sessions.open("bob") as other:  # with its lease
            other.append(Message.user("Me too"))
            await other.save()
        assert [one.text for one in session.context()] == ["Hello", "Still there?"]


@GIVEN
def test_the_password_is_asked_for_under_plain_asyncio(give: Give, role: Role) -> None:
    async def main() -> None:
        store = PostgresStore(role.url, schema=role.name, password=give(role))
        async with perdure.connect(store) as sessions, sessions.open("ada") as session:
            session.append(Message.user("Hello"))
            assert (await session.save()).durability

    asyncio.run(asyncio.wait_for(main(), LONG))


async def test_a_password_that_cannot_be_had_is_told_without_its_secrets(role: Role) -> None:
    def fails() -> str:
        raise RuntimeError("the token first-Secret is stale")

    store = PostgresStore(role.url, schema=role.name, password=fails)
    with pytest.raises(StoreUnavailableError, match="password= failed with RuntimeError") as caught:
        await store.open()
    assert "Secret" not in str(caught.value)
    store = PostgresStore(role.url, schema=role.name, password="wrong-Secret")
    with pytest.raises(StoreUnavailableError, match="check user, password") as caught:
        await store.open()
    assert "wrong-Secret" not in str(caught.value)
    store = PostgresStore(role.url, schema=role.name, password=lambda: 5)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="returned a int"):
        await store.open()


async def test_a_session_is_saved_once_the_password_can_be_had_again(role: Role) -> None:
    broken = False

    async def password() -> str:
        if broken:
            raise OSError("no token now")
        return role.password

    store = PostgresStore(role.url, schema=role.name, password=password)
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        broken = True
        role.change("second-Secret")
        session.append(Message.user("Hello"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.save)
            await anyio.sleep(0.2)
            broken = False
    async with perdure.connect(store) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert [one.text for one in view.context()] == ["Hello"]


def test_two_passwords_are_refused(server: Postgres) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        PostgresStore(server.url, password="another")
