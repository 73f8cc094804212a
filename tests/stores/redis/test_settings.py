"""What a URL may say, and that the password in it is never said again."""

from __future__ import annotations

import logging

import msgspec
import pytest

from perdure import connect, store_for
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.stores.redis import RedisStore
from perdure.stores.redis.connection import settings_from
from tests.servers.valkey import Valkey

SECRET = "s3cr%40t"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://localhost", "redis://localhost:6379/0?prefix=perdure"),
        ("valkey://h:7/3?prefix=a:b", "redis://h:7/3?prefix=a:b"),
        ("rediss://u:p@h:7", "rediss://h:7/0?prefix=perdure"),
        ("valkeys://[::1]:7/1", "rediss://[::1]:7/1?prefix=perdure"),
        ("redis://:p%40%2F%23@h?db=2", "redis://h:6379/2?prefix=perdure"),
        ("unix:///run/v.sock?db=1", "unix:///run/v.sock?db=1&prefix=perdure"),
    ],
)
def test_a_url_names_a_server(url: str, location: str) -> None:
    store = store_for(url)
    assert isinstance(store, RedisStore)
    assert store.location == location


def test_what_is_escaped_is_meant_as_it_is() -> None:
    said = settings_from("redis://me%3A:p%40%2F%23%3F@h?timeout=0.5&connect_timeout=2&wait=no")
    assert (said.username, said.password) == ("me:", "p@/#?")
    assert (said.timeout, said.connect_timeout, said.wait) == (0.5, 2.0, False)


@pytest.mark.parametrize(
    "rest",
    [
        "//u:s3cr/t@host/0",
        "//u:s3cr#t@host/0",
        "//u:s3cr?t@host/0",
        "//u:1#s3cr@host",
        "//u:1/s3cr@host",
        "//u:1?s3cr@host",
        "//u:s3cr@host:port/0",
        "//u:s3cr@",
        "//u:s3cr@host/zero",
        "//u:s3cr@host?db=-1",
        "//u:s3cr@host?timeout=soon",
        "//u:s3cr@host?timeout=0",
        "//u:s3cr@host?connect_timeout=inf",
        "//u:s3cr@host?prefix={tag}",
        "//u:s3cr@host?prefix=",
        "//u:s3cr@host?wait=maybe",
        "//u:s3cr@host?max_connections=9",
        "s3cr",
    ],
)
def test_a_url_that_does_not_fit_is_refused_without_showing_it(rest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        store_for(f"redis:{rest}")
    assert "s3cr" not in str(caught.value)
    assert (
        "use" in str(caught.value) or "known" in str(caught.value) or "write" in str(caught.value)
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:s3cr@one:26379,two:26379/mymaster",
        "rediss+sentinel://one:26379/mymaster/0",
        "redis-sentinel://one:26379/mymaster",
        "valkey+sentinel://one",
        "redis+cluster://one:7000",
        "redis://one:7000,two:7001,three:7002/0",
        "redis://me:s3cr@one,two/0?prefix=x",
        "valkey://one:1,two/0",
    ],
)
def test_sentinels_and_clusters_are_refused_with_the_cure(url: str) -> None:
    with pytest.raises(ConfigError, match="talks to one primary: use redis://host") as caught:
        connect(url)
    assert "s3cr" not in str(caught.value)


def test_a_sockets_path_is_absolute() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        store_for("unix://run/v.sock")


def test_no_text_shows_the_password() -> None:
    url = f"redis://me:{SECRET}@localhost:1/0"
    said = settings_from(url)
    store = RedisStore(url)
    shown = [repr(said), str(said), repr(store), str(store), store.location, repr(connect(store))]
    shown += [repr(said.__rich_repr__()), repr(vars(store))]
    for text in shown:
        assert "s3cr" not in text
        assert "me:" not in text
    assert msgspec.structs.asdict(said)["password"] == "s3cr@t"


async def test_a_server_that_is_not_there_is_named_without_the_password(
    own_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.kill()
    store = RedisStore(f"redis://me:{SECRET}@127.0.0.1:{own_server.port}/0")
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreUnavailableError) as caught:
        await store.open()
    assert f"127.0.0.1:{own_server.port}" in str(caught.value)
    assert "s3cr" not in str(caught.value) + caplog.text + repr(caught.value.__cause__)
    await store.aclose()


async def test_a_socket_is_as_good_as_a_port(server: Valkey) -> None:
    store = RedisStore(f"unix://{server.socket}?db=3")
    await store.open()
    assert await store.sessions() == []
    assert store.capabilities.durability == "fsync"
    await store.aclose()


async def test_a_wrong_password_is_told_as_such(own_server: Valkey) -> None:
    own_server.say("ACL", "SETUSER", "app", "on", ">right", "~*", "&*", "+@all")
    for who in ("app:s3cr", "nobody:s3cr"):
        store = RedisStore(own_server.url.replace("//", f"//{who}@"))
        with pytest.raises(StoreUnavailableError, match="refused the user or the password") as no:
            await store.open()
        assert "s3cr" not in str(no.value)
    store = RedisStore(own_server.url.replace("//", "//app:right@"))
    await store.open()
    assert await store.sessions() == []
    await store.aclose()
