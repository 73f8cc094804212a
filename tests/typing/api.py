"""Code that type checkers must accept: how people use perdure. It is checked, never run."""

from __future__ import annotations

from typing import assert_type

from perdure.autosave.options import Autosave, Shutdown
from perdure.errors import ConfigError, LeaseHeldError, PerdureError, SessionError
from perdure.model.keys import SessionKey
from perdure.model.records import MESSAGE, Entry
from perdure.store import Batch, Grant, Outcome, Status, Store


def options() -> None:
    assert_type(Autosave(debounce=1, max_delay=5.0), Autosave)
    assert_type(Autosave.server(), Autosave)
    assert_type(Autosave.write_through().debounce, float)
    assert_type(Shutdown(deadline=10.0, spill="/var/tmp/spill").spill, str | None)


def errors_are_one_tree() -> None:
    try:
        options()
    except LeaseHeldError as error:
        assert_type(error.facts, dict[str, object])
    except (ConfigError, SessionError) as error:
        everything: PerdureError = error
        raise everything from None


async def a_store(store: Store) -> list[Outcome]:
    key = SessionKey(agent="mia", session="default", tenant="acme")
    holder = await store.holder(key)
    grant = await store.acquire(key, after=holder.epoch if holder else 0)
    assert_type(grant, Grant)
    entries = (Entry(MESSAGE, b'{"role":"user"}'), Entry(kind=MESSAGE, payload=b"{}", end=True))
    batch = Batch(key=key, epoch=grant.epoch, first=grant.head + 1, records=entries)
    async for chunk in store.read_log(key, after=0, limit=10):
        assert_type(chunk.records[0].seq, int)
    outcomes = await store.append_many([batch])
    assert_type(outcomes[0].status, Status)
    return outcomes
