"""Where an episode keeps its sessions: a fresh place of a kind, and stores that are restless or forgetful.

A place is plain values, so that a second process can be told of it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio.lowlevel
import msgspec

import perdure
from perdure import SessionKey
from perdure.store import Documents, LogChunk, Store
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.crash.scratch import MEMORY

SQLITE_TIMEOUT = 2.0
KINDS = ("file", "sqlite", "memory", "encrypted", "postgres", "valkey", "s3")
KEY = "5a" * 32

_backings: dict[str, MemoryBacking] = {}


class Place(NamedTuple):
    """A kind of store, and a root of its own below which each name is one store."""

    kind: str
    root: str
    server: str = ""

    def store(self, name: str) -> Store:
        """Return a store of this place, not open yet."""
        root = f"{self.root}/{name}"
        if self.kind == "file":
            return perdure.store_for(root)
        if self.kind == "encrypted":
            from perdure.stores.wrapped import EncryptedStore

            return EncryptedStore(perdure.store_for(root), KEY)
        if self.kind == "s3":
            from perdure.stores.s3 import S3Store
            from tests.servers import s3

            prefix = s3.prefix_of(Path(root))
            account, url = s3.CREDENTIALS, self.server
            return S3Store(s3.BUCKET, prefix, region="us-east-1", credentials=account, endpoint=url)
        if self.kind == "sqlite":
            from perdure.stores.sqlite import SqliteStore

            return SqliteStore(Path(f"{root}.db"), timeout=SQLITE_TIMEOUT)
        if self.kind == "memory":
            return MemoryStore(backing=_backings.setdefault(root, MemoryBacking()))
        if self.kind == "postgres":
            from perdure.stores.postgres import PostgresStore
            from tests.servers.postgres import schema_of

            return PostgresStore(self.server, schema=schema_of(Path(root)))
        from perdure.stores.redis import RedisStore

        return RedisStore(f"{self.server}?prefix={Path(self.root).name}-{name}")

    @property
    def is_shared(self) -> bool:
        """Whether another process can use it."""
        return self.kind != "memory"

    def remove(self) -> None:
        """Remove everything of it."""
        shutil.rmtree(self.root, ignore_errors=True)
        Path(f"{self.root}.migrating").unlink(missing_ok=True)
        for root in [root for root in _backings if root.startswith(self.root)]:
            del _backings[root]
        if self.kind == "postgres":
            self._drop_schemas()

    def _drop_schemas(self) -> None:
        import psycopg

        from tests.servers.postgres import schema_of

        with psycopg.connect(self.server, autocommit=True) as connection:
            for name in NAMES:
                schema = schema_of(Path(f"{self.root}/{name}"))
                for left in reversed(range(_TRIES)):
                    try:
                        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
                        break
                    except psycopg.errors.DeadlockDetected:
                        if not left:  # else what a killed process had asked for was still running
                            raise


NAMES = ("main", "backup", "restored", "moved")
_TRIES = 5


def server_of(wanted: str) -> tuple[str, str]:
    """Return the kind of what ``--store`` names, and its server, which is started if it is none.

    A URL of a server is used as it is: each episode has a schema or a prefix of its own there. Of a file or a database
    it is the folder in which each episode has one of its own.
    """
    if wanted in KINDS:
        if wanted == "postgres":
            from tests.servers.postgres import shared as postgres

            return wanted, postgres(fsync=False).url
        if wanted == "valkey":
            from tests.servers.valkey import shared as valkey

            return wanted, valkey().url
        if wanted == "s3":
            from tests.servers.s3 import shared as s3

            return wanted, s3().endpoint
        return wanted, ""
    scheme = wanted.partition(":")[0]
    kinds = {
        "postgresql": "postgres",
        "postgres": "postgres",
        "redis": "valkey",
        "valkey": "valkey",
    }
    if scheme in kinds:
        return kinds[scheme], wanted
    if scheme in ("file", "sqlite"):
        return scheme, wanted.partition(":")[2].removeprefix("//")
    raise ValueError(f"--store {wanted!r}: give one of {', '.join(KINDS)}, or a URL")


def fresh(kind: str, server: str) -> Place:
    """Return a new place, in memory where there is a file system for it."""
    folder = MEMORY if Path(MEMORY).is_dir() else None
    if kind in ("file", "sqlite") and server:
        Path(server).mkdir(parents=True, exist_ok=True)
        folder = server
    return Place(kind, tempfile.mkdtemp(prefix="perdure-schedule-", dir=folder), server)


async def wobble(dice: random.Random) -> None:
    """Give way to the loop some number of times."""
    for _ in range(dice.choice((0, 0, 0, 1, 1, 2, 3, 5, 8, 13))):
        await anyio.lowlevel.checkpoint()


class RestlessStore(DelegatingStore):
    """Gives way around each call: what the loop runs in between is drawn."""

    def __init__(self, store: Store, dice: random.Random) -> None:
        super().__init__(store)
        self._dice = dice

    async def read_log(self, *args: Any, **options: Any) -> AsyncGenerator[LogChunk, None]:
        await wobble(self._dice)
        async with aclosing(self.inner.read_log(*args, **options)) as log:
            async for chunk in log:
                yield chunk
                await wobble(self._dice)


def _restless(name: str) -> Callable[..., Any]:
    async def call(self: RestlessStore, *args: Any, **options: Any) -> Any:
        await wobble(self._dice)
        result = await getattr(self.inner, name)(*args, **options)
        await wobble(self._dice)
        return result

    return call


for _name in (
    "append_many head trim read_documents write_documents put_blobs get_blob sweep blob_names remove_blobs holder acquire release "
    "request_handover enqueue receive ack sessions sessions_with_pending_items delete publish drafts renew".split()
):
    setattr(RestlessStore, _name, _restless(_name))


class NoDocuments(DelegatingStore):
    """A store of which every document is damaged: what a session is has to come from its log."""

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        have = await self.inner.read_documents(key, names)
        damaged = tuple({*have.found, *have.damaged})
        return msgspec.structs.replace(have, found={}, damaged=damaged)


def lineage_of(store: Store) -> Store:
    """Return a store whose logs are whole, whatever else they share."""
    with suppress(ImportError):
        from perdure.session.stored import followed

        return followed(store)
    return store
