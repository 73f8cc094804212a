"""The PostgreSQL store, as users would make and use it."""

from __future__ import annotations

from typing import assert_type

import perdure
from perdure.stores import PostgresStore

URL = "postgresql://me@localhost/agents"
store = PostgresStore(URL, schema="app", connections=8, owner="worker-1")
assert_type(store.location, str)
assert_type(store.capabilities.durability, str)
sessions: perdure.SessionManager = perdure.connect(store)
again: perdure.SessionManager = perdure.connect(f"{URL}?schema=app&timeout=5")
