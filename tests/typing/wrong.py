"""Code that type checkers must refuse, at each marked line and nowhere else. It is never run."""

from __future__ import annotations

import perdure
from perdure.autosave.options import Autosave
from perdure.errors import LeaseHeldError
from perdure.model.keys import SessionKey
from perdure.store import Store

perdure.no_such_name  # error: attr-defined

Autosave(2.0)  # error: call-arg
Autosave(debounce="2 s")  # error: arg-type
Autosave(interval=2.0)  # error: call-arg
Autosave().debounce = 3.0  # error: misc

SessionKey()  # error: call-arg
SessionKey(agent="mia").agent = "leo"  # error: misc
SessionKey(agent=7)  # error: arg-type

LeaseHeldError("held").no_such_fact  # error: attr-defined


async def a_store(store: Store, key: SessionKey) -> None:
    await store.acquire(key)  # error: call-arg
    await store.acquire("mia", after=0)  # error: arg-type
    await store.read_log(key)  # error: misc
    store.capabilities.durability.no_such_name  # error: attr-defined
    store.location = "elsewhere"  # error: misc
