"""The URL: what is perdure's, what is libpq's, and what nobody may see."""

from __future__ import annotations

import pytest

import perdure
from perdure.errors import ConfigError
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.connections import quoted, settings_of

SECRET = "hun%ter2"
URL = "postgresql://me:hun%25ter2@db.example:5433/agents"


def test_a_url_is_divided() -> None:
    found = settings_of(f"{URL}?schema=my&sslmode=require&connections=9&timeout=2.5&keepalives=1")
    assert found.conninfo == f"{URL}?sslmode=require&keepalives=1"
    assert (found.schema, found.connections, found.timeout) == ("my", 9, 2.5)
    assert settings_of(URL).conninfo == URL
    assert (settings_of(URL).schema, settings_of(URL).timeout) == ("perdure", 15.0)


@pytest.mark.parametrize(
    "url",
    [
        URL,
        f"{URL}?schema=x",
        "postgresql://me@db.example:5433/agents?password=hun%25ter2",
        "postgresql://me@db.example/agents?sslpassword=hun%25ter2&sslmode=require",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    store = PostgresStore(url, owner="me")  # a random one may have the word
    settings = settings_of(url)
    for text in (store.location, repr(store), repr(settings), str(settings), str(vars(store))):
        assert "ter2" not in text
    assert settings.hide(f"no route for {SECRET} or hun%25ter2") == "no route for … or …"
    assert "me@db.example" in store.location


def test_the_location_names_a_schema_of_ones_own() -> None:
    assert settings_of(URL).location == "postgresql://me@db.example:5433/agents"
    assert settings_of(URL, schema="a b").location.endswith("/agents?schema=a%20b")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "PostgreSQL"])
def test_both_schemes_lead_here(scheme: str) -> None:
    store = perdure.store_for(f"{scheme}://me:hunter2@db.example/agents")
    assert isinstance(store, PostgresStore)
    assert store.location == "postgresql://me@db.example/agents"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("schema=", "schema"),
        ("schema=pg_mine", "schema"),
        ("schema=information_schema", "schema"),
        ("schema=a%00b", "schema"),
        ("schema=" + "x" * 64, "schema"),
        ("schema=" + "%C3%A9" * 32, "schema"),
        ("connections=1", "connections"),
        ("connections=many", "connections"),
        ("connections=-3", "connections"),
        ("connections=101", "connections"),
        ("timeout=0", "timeout"),
        ("timeout=nan", "timeout"),
        ("timeout=soon", "timeout"),
        ("timeout=inf", "timeout"),
    ],
)
def test_what_does_not_fit_is_named(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as found:
        PostgresStore(f"{URL}?{query}")
    assert found.value.facts["option"] == named
    assert "ter2" not in str(found.value)


@pytest.mark.parametrize("url", ["postgresql:", "postgresql:db", "mysql://db", "postgres:/db"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        PostgresStore(url)


def test_a_name_is_quoted_whatever_is_in_it() -> None:
    assert quoted('a"; DROP SCHEMA public; --') == '"a""; DROP SCHEMA public; --"'
