"""A pooler that shares server connections is recognized, and nothing is left behind on them."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

import perdure
from perdure import ConfigError, Message
from tests.servers import postgres
from tests.servers.pooler import Pooler

SET = (
    "enable_seqscan",
    "enable_hashjoin",
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "default_transaction_isolation",
    "application_name",
)


@pytest.fixture
def anyio_backend() -> str:
    """One loop: poolers are met in threads."""
    return "asyncio"


def url_of(pooler: Pooler, place: Path) -> str:
    schema = postgres.schema_of(place)
    return f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres?schema={schema}"


async def talk(url: str) -> list[str]:
    for text in ("one", "two"):
        async with perdure.connect(url) as sessions, sessions.open("ada") as session:
            async with session.turn():
                session.append(Message.user(text))
            context = session.context()
    return [message.text for message in context]


@pytest.mark.parametrize("oldest", [False, True], ids=["newest", "oldest"])
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_a_pooler_of_transactions_is_refused_and_left_as_it_was(
    size: int, oldest: bool, tmp_path: Path
) -> None:
    with Pooler(postgres.shared().url, "transaction", size=size, oldest=oldest) as pooler:
        before = pooler.settings(*SET)
        for _ in range(3):
            with pytest.raises(
                ConfigError, match="pool_mode=transaction.*the server's own address"
            ):
                await talk(url_of(pooler, tmp_path))
        assert pooler.settings(*SET) == before


async def test_so_it_is_while_other_programs_use_it(tmp_path: Path) -> None:
    with Pooler(postgres.shared().url, "transaction", size=4) as pooler, Busy(pooler):
        for _ in range(5):
            with pytest.raises(ConfigError, match="pool_mode=transaction"):
                await talk(url_of(pooler, tmp_path))


@pytest.mark.deep
async def test_a_pooler_of_sessions_is_as_good_as_the_server(tmp_path: Path) -> None:
    with Pooler(postgres.shared().url, "session", size=12) as pooler:
        assert await talk(url_of(pooler, tmp_path)) == ["one", "two"]


class Busy:
    """Two other programs, one short transaction after the other."""

    def __init__(self, pooler: Pooler) -> None:
        self._conninfo = f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(2)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            while not self._stop.is_set():
                connection.execute("SELECT 1", prepare=False)
