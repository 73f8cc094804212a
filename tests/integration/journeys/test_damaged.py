"""A bit that flipped in what is stored is noticed, its session named, and no other one harmed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import perdure
from perdure import CorruptRecordError, Message, SessionManager
from perdure.records.keys import SessionKey
from perdure.stores.objects.layout import folder_of
from perdure.stores.redis.layout import KeyNames
from tests.integration.journeys.backends import ALL, store_of
from tests.servers import postgres, s3, valkey
from tests.stores.redis.test_damage import rewrite

pytestmark = pytest.mark.deep

BAD, GOOD = "damaged", "sound"
TURNS = 4


def flipped(data: bytes) -> bytes:
    """Flip a bit near the middle, within a record."""
    at = len(data) // 2
    while data[at] in b'\n"{}':
        at += 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def flip(kind: str, place: Path) -> None:
    """Flip a bit in the longest stored part of the log of one session, behind the store's back."""
    match kind.rpartition("+")[2]:
        case "file":
            log = max(place.glob(f"files/agents/{BAD}/log/*"), key=lambda one: one.stat().st_size)
            log.write_bytes(flipped(log.read_bytes()))
        case "sqlite":
            _flip_row(place / "sqlite" / "store.db")
        case "postgres":
            schema = postgres.schema_of(place)
            postgres.shared().run(
                f"UPDATE {schema}.commits SET lines = set_bit(lines, length(lines) * 4, "
                "1 - get_bit(lines, length(lines) * 4)) WHERE first = 2 AND session = "
                f"(SELECT id FROM {schema}.sessions WHERE agent = '{BAD}')"
            )
        case "redis":
            log = KeyNames(s3.prefix_of(place)).session_keys(SessionKey(BAD)).log
            rewrite(valkey.shared(), log, _flip_entry)
        case _:
            client = s3.shared().client(s3.prefix_of(place))
            found = [one for page in client.list(folder_of(SessionKey(BAD))) for one in page]
            logs = [one for one in found if "/log/" in one["path"] or "/seg/" in one["path"]]
            name = max(logs, key=lambda one: one["size"])["path"]
            client.put(name, flipped(bytes(client.get(name).bytes())))


def _flip_row(path: Path) -> None:
    con = sqlite3.connect(path)
    query = (
        "SELECT log.rowid, data FROM log JOIN session ON session.id = log.session "
        "WHERE agent = ? ORDER BY length(data) DESC"
    )
    row, data = con.execute(query, [BAD]).fetchone()
    con.execute("UPDATE log SET data = ? WHERE rowid = ?", [flipped(data), row])
    con.commit()
    con.close()


def _flip_entry(place: int, id: bytes, epoch: bytes, data: bytes) -> tuple[bytes, ...]:
    return id, epoch, flipped(data) if place == 1 else data


async def texts(sessions: SessionManager, id: str) -> list[str]:
    """Read a session's whole history."""
    view = await sessions.load(id)
    assert view is not None
    history = await view.history(limit=1000)
    return [item.value.text for item in history if item.kind == "message"]


@pytest.mark.parametrize("kind", ALL)
async def test_a_flipped_bit_is_named_and_harms_no_other_session(kind: str, tmp_path: Path) -> None:
    said = [f"{number} " + "word " * 40 for number in range(TURNS)]
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        for id in (BAD, GOOD):
            session = await sessions.open(id)
            for text in said:
                async with session.turn():
                    session.append(Message.user(text))
            await session.aclose()
        assert await texts(sessions, BAD) == said
    flip(kind, tmp_path)
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        with pytest.raises(CorruptRecordError, match=BAD):
            await texts(sessions, BAD)
        assert await texts(sessions, GOOD) == said
        async with sessions.open(GOOD) as session, session.turn():
            session.append(Message.user("more"))
        await session.aclose()
        assert await texts(sessions, GOOD) == [*said, "more"]
