"""Which store is crashed: each kind makes one at a root, for an owner.

The kind is chosen once for a whole run, before any child is forked. A backend joins by a
line in `KINDS`; what its stores of one root keep must be theirs alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import EncryptedStore
from tests.crash.forks import Child
from tests.servers import at_exit_of_this_process

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

Make = Callable[[Path, str | None], Store]

TIMEOUT = 0.5
"""Seconds that a writer waits for another one that was stopped within its transaction."""


def _sqlite(root: Path, owner: str | None) -> Store:
    return SqliteStore(root / "store.db", owner=owner, timeout=TIMEOUT)


KINDS: dict[str, Make] = {
    "file": lambda root, owner: FileStore(root, owner=owner),
    "encrypted": lambda root, owner: EncryptedStore(_sqlite(root, owner), "5a" * 32),
    "encrypted-file": lambda root, owner: EncryptedStore(FileStore(root, owner=owner), "5a" * 32),
    "sqlite": _sqlite,
}


def _postgres(root: Path, owner: str | None) -> Store:
    from perdure.stores.postgres import PostgresStore
    from tests.servers.postgres import schema_of, shared

    return PostgresStore(shared(fsync=True).url, schema=schema_of(root), owner=owner)


KINDS["postgres"] = _postgres


def _redis(root: Path, owner: str | None) -> Store:
    from perdure.stores.redis import RedisStore
    from tests.servers.valkey import shared

    return RedisStore(f"{shared().url}?prefix={root.parent.name}", owner=owner)


def _s3(root: Path, owner: str | None) -> Store:
    from perdure.stores.objects import store
    from tests.servers.s3 import store_on

    store._COMPACT = 4  # commits are merged in the background, too, while this is crashed
    return store_on(_s3_server(), root, owner=owner)


@functools.cache
def _s3_server() -> S3Server:
    """Return this process's server. The driver has threads: no parent of forks may use it."""
    from tests.servers.s3 import S3Server

    assert "obstore" not in sys.modules, "a forked child would wait for the driver's threads"

    class Server(S3Server):
        def _until_writable(self) -> None:
            child = Child(lambda _: super(Server, self)._until_writable())
            assert child.wait() == [], child.events

    server = Server()
    server.start()
    at_exit_of_this_process(server.close)
    return server


KINDS |= {"redis": _redis, "s3": _s3}
SERVERS = ("postgres", "redis", "s3")

_chosen = ["file"]


def choose(kind: str) -> None:
    """Crash stores of this kind from here on."""
    assert kind in KINDS, kind
    _chosen[0] = kind
    if kind in SERVERS:
        KINDS[kind](Path("any/any"), None)  # its server, before any child is forked


def chosen() -> str:
    """Return the kind that is crashed."""
    return _chosen[0]


def url(root: Path) -> str:
    """Return where the command line finds such a store."""
    if _chosen[0] == "postgres":
        from tests.servers.postgres import schema_of, shared

        return f"{shared(fsync=True).url}?schema={schema_of(root)}"
    if _chosen[0] == "redis":
        from tests.servers.valkey import shared as valkey

        return f"{valkey().url}?prefix={root.parent.name}"
    return {"file": str(root), "sqlite": f"sqlite:///{root / 'store.db'}"}[_chosen[0]]


def make(root: Path, owner: str | None) -> Store:
    """Return a store of the chosen kind, not open yet."""
    return KINDS[_chosen[0]](root, owner)
