"""Opening: servers that are not there or refuse, and many replicas that start at once."""

from __future__ import annotations

import subprocess
import sys
import time

import anyio
import pytest

from perdure.errors import (
    ConfigError,
    MissingExtraError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.store import Batch, SessionQuery, Status
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.schema import LATEST
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    group,
    manifest_of,
    read,
    take,
)
from tests.servers import free_port
from tests.servers.postgres import PASSWORD, Postgres
from tests.stores.postgres.conftest import OpenStore

HOSTILE = 'My "own" %s; DROP $$ schema'


def shown(error: BaseException) -> str:
    """Return everything that a traceback would show of an error."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts += [str(seen), repr(seen), repr(getattr(seen, "facts", ""))]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(texts)


async def refused(url: str, **options: object) -> str:
    store = PostgresStore(url, **options)  # type: ignore[arg-type]
    with pytest.raises((StoreUnavailableError, ConfigError)) as found:
        await store.open()
    text = shown(found.value)
    assert PASSWORD not in text
    assert "wrong-Secret" not in text
    return str(found.value)


async def test_a_server_that_is_not_there_is_named(server: Postgres) -> None:
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:{free_port()}/agents"
    said = await refused(url)
    assert "postgresql://me@127.0.0.1" in said
    assert "make sure that the server runs" in said


async def test_a_password_that_is_a_word_of_the_url_leaves_the_url_as_it_is() -> None:
    said = await refused(f"postgresql://postgres:postgres@127.0.0.1:{free_port()}/postgres")
    assert "cannot reach postgresql://postgres@127.0.0.1" in said


async def test_a_wrong_password_is_told_and_not_shown(server: Postgres) -> None:
    said = await refused(server.url.replace(PASSWORD, "wrong-Secret"))
    assert "user, password" in said


async def test_a_database_that_is_missing_is_told(server: Postgres) -> None:
    said = await refused(f"{server.url.rsplit('/', 1)[0]}/missing")
    assert "create the database" in said


async def test_what_libpq_does_not_know_is_told_without_the_password(server: Postgres) -> None:
    said = await refused(f"{server.url}?nonsense={PASSWORD}")
    assert "is not valid" in said
    said = await refused(f"postgresql://me:{PASSWORD}@127.0.0.1:port/x")
    assert "127.0.0.1" in said


async def test_a_user_without_rights_is_told_which(server: Postgres, schema: str) -> None:
    server.run(f"CREATE ROLE {schema} LOGIN PASSWORD 'wrong-Secret'")
    server.run("REVOKE CREATE ON DATABASE postgres FROM PUBLIC")
    url = f"postgresql://{schema}:wrong-Secret@127.0.0.1:{server.port}/postgres"
    assert "grant this user" in await refused(url, schema=schema)


async def test_a_database_that_cannot_hold_every_id_is_refused(
    server: Postgres, schema: str
) -> None:
    server.run(f"CREATE DATABASE {schema} ENCODING 'SQL_ASCII' TEMPLATE template0")
    said = await refused(f"{server.url.rsplit('/', 1)[0]}/{schema}")
    assert "UTF8" in said
    server.run(f"DROP DATABASE {schema} WITH (FORCE)")


async def test_many_replicas_may_start_at_once(server: Postgres, schema: str) -> None:
    stores = [PostgresStore(server.url, schema=schema, connections=2) for _ in range(8)]
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.open)
    assert server.run(f'SELECT version FROM "{schema}".perdure') == [(LATEST,)]
    grant = await take(stores[0])
    await append_ok(stores[0], grant, 2, *group("a"))
    assert len(await read(stores[7])) == 2
    for store in stores:
        await store.aclose()


async def test_tables_of_a_newer_release_are_refused_and_left(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    await append_ok(await open_store("one"), await take(await open_store("one")), 2, *group("a"))
    server.run(f'UPDATE "{schema}".perdure SET version = 99')
    with pytest.raises(UnsupportedVersionError, match="99"):
        await open_store("two")
    assert server.run(f'SELECT count(*) FROM "{schema}".commits') == [(2,)]


async def test_a_schema_may_have_any_name(server: Postgres) -> None:
    store = PostgresStore(server.url, schema=HOSTILE)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    holder = await store.holder(KEY)
    assert holder is not None
    await store.request_handover(KEY, holder)
    assert (await store.heartbeat()).handovers == (KEY,)
    await store.scrub()
    await store.aclose()
    quoted = HOSTILE.replace('"', '""')
    found = server.run("SELECT nspname FROM pg_namespace WHERE nspname = %s", HOSTILE)
    assert found == [(HOSTILE,)]
    server.run(f'DROP SCHEMA "{quoted}" CASCADE')


async def test_schemas_do_not_see_each_other(server: Postgres, open_store: OpenStore) -> None:
    await append_ok(await open_store("one"), await take(await open_store("one")), 2, *group("a"))
    other = PostgresStore(server.url, schema="t_other")
    await other.open()
    assert await other.head(KEY) == 0
    assert await other.tenants() == []
    await other.aclose()


async def test_durability_is_what_the_server_says(server: Postgres, schema: str) -> None:
    assert "fsync=off" in await durability(server.url, schema)
    lax = f"{server.url}?options=-c%20synchronous_commit%3Doff"
    assert "synchronous_commit=off" in await durability(lax, schema)


async def test_a_server_that_syncs_is_called_durable(own_server: Postgres) -> None:
    assert await durability(own_server.url, "perdure") == "fsync"


async def durability(url: str, schema: str) -> str:
    store = PostgresStore(url, schema=schema)
    await store.open()
    try:
        return store.capabilities.durability
    finally:
        await store.aclose()


async def test_a_store_that_is_not_open_says_so(server: Postgres, schema: str) -> None:
    store = PostgresStore(server.url, schema=schema)
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.head(KEY)
    await store.open()
    grant = await take(store)
    await store.aclose()
    await store.aclose()
    outcome = await append(store, grant, 2, *group("late"))
    assert outcome.status is Status.TRANSIENT


async def test_a_missing_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, server: Postgres, schema: str
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"perdure\[postgres\]"):
        await PostgresStore(server.url, schema=schema).open()


def test_the_driver_is_imported_late() -> None:
    code = "import sys, perdure.stores.postgres as p; p.PostgresStore('postgresql://a/b'); "
    code += "assert 'psycopg' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def to_version_3(server: Postgres, schema: str) -> None:
    for statement in (
        """UPDATE {0}.manifests AS m SET owner = s.belongs, turns = s.turns, title = l.title,
        tags = l.tags FROM {0}.sessions AS s, {0}.labels AS l
        WHERE s.id = m.session AND l.session = m.session""",
        "DROP TABLE {0}.labels",
        "ALTER TABLE {0}.sessions DROP COLUMN turns, DROP COLUMN belongs, DROP COLUMN step",
        "ALTER TABLE {0}.manifests ALTER COLUMN tags SET NOT NULL, ALTER turns SET NOT NULL",
        "UPDATE {0}.perdure SET version = 3",
    ):
        server.run(statement.format(f'"{schema}"'))


async def test_tables_of_version_3_are_listed_as_of_their_folds_until_they_are_saved(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store = await open_store("one")
    for name, owner in (("old", "ann"), ("new", "ann"), ("other", "bob")):
        grant = await take(store, SessionKey(name))
        head = await append_ok(store, grant, 2, *group("a"))
        about = About(owner=owner, title=f"The {name} one", tags=("vip",) * (name == "old"))
        documents = {"session.json": b"{}"}
        manifest = manifest_of(grant, head, documents, about=about, counters={"turns": 7})
        await store.write_documents(grant.key, documents, manifest)
    await store.aclose()
    to_version_3(server, schema)
    store = await open_store("two")
    (info,) = await store.sessions(SessionQuery(owner="ann", tag="vip"))
    assert (info.key.agent, info.title, info.turns) == ("old", "The old one", 7)
    newest = await store.sessions(SessionQuery(newest_first=True))
    assert [info.key.agent for info in newest] == ["other", "new", "old"]
    grant = await take(store, SessionKey("old"))
    batch = Batch(grant.key, grant.epoch, grant.head + 1, group("b"), turns=8)
    assert [outcome.status for outcome in await store.append_many([batch])] == [Status.OK]
    (info, _) = await store.sessions(SessionQuery(newest_first=True, owner="ann"))
    assert (info.key.agent, info.title, info.turns) == ("old", "The old one", 8)


async def test_what_a_release_without_steps_saves_is_in_its_place(
    server: Postgres, schema: str, store: PostgresStore
) -> None:
    """Its process has the tables open since before they were migrated."""
    for name in ("a", "b", "c"):
        await take(store, SessionKey(name))
    past = f'UPDATE "{schema}".sessions SET updated_at = now()'
    server.run(f"{past} - interval '1 day'")
    server.run(f"{past} - interval '1 hour' WHERE agent = 'b'")
    found: list[str] = []
    query = SessionQuery(newest_first=True, limit=1)
    while page := await store.sessions(query):
        found += [info.key.agent for info in page]
        query = query.after_page(page[-1])
        assert len(found) <= 3
    assert found == ["b", "c", "a"]
    since = SessionQuery(since=time.time() - 2 * 3600)
    assert [info.key.agent for info in await store.sessions(since)] == ["b"]


async def test_a_migration_to_version_4_leaves_no_old_versions_of_rows(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store = await open_store("one")
    await take(store)
    await store.aclose()
    to_version_3(server, schema)
    server.run(
        f"""INSERT INTO "{schema}".sessions (tenant, agent, session, epoch, updated_at)
        SELECT s.tenant, 'many-' || n, 'default', 1, now()
        FROM "{schema}".sessions AS s, generate_series(1, 10000) AS n"""
    )
    server.run(
        f"""INSERT INTO "{schema}".manifests (session, sealed, owner, tags, turns)
        SELECT id, '', 'ann', '{{}}', 1 FROM "{schema}".sessions"""
    )
    size = f"SELECT pg_relation_size('\"{schema}\".sessions')"
    ((before,),) = server.run(size)
    await open_store("two")
    ((after,),) = server.run(size)
    assert after < 1.6 * before  # a row has more now, but one version
