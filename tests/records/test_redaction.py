"""Credentials are recognized by their keys, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from perdure.errors import TooLargeError
from perdure.records.values import DENY_KEYS, REDACTED, redact


@pytest.mark.parametrize(
    "key",
    [
        *sorted(DENY_KEYS),
        *["API_KEY", "apiKey", "api-key", "Api Key", "OPENAI_API_KEY", "x-api-key", "X.Api.Key"],
        *["Authorization", "Proxy-Authorization", "dbPassword", "AWS_SECRET_ACCESS_KEY"],
        *["OPENAI_KEY", "apiKeys", "api_key_2", "client_secret_v2", "private_key_pem", "password1"],
        *["tokens", "auth", "\uff50\uff41\uff53\uff53\uff57\uff4f\uff52\uff44"],
    ],
)
def test_a_credential_is_replaced_whatever_its_spelling(key: str) -> None:
    value, paths = redact({"outer": [{key: "canary", "model": "m"}]})
    assert value == {"outer": [{key: REDACTED, "model": "m"}]}
    assert paths == (f"/outer/0/{key}",)


@pytest.mark.parametrize(
    "key",
    [
        *["max_tokens", "tokenizer", "token_count", "secretary", "keys", "key", "author", "", "_"],
        *["SSH_PUBLIC_KEY", "primary_key", "oauth_url", "value", "1", "hash"],
    ],
)
def test_what_only_looks_like_one_is_kept(key: str) -> None:
    config = {key: "value"}
    assert redact(config) == (config, ())


@pytest.mark.parametrize("empty", [None, True, False, "", b"", [], {}, REDACTED])
def test_what_is_empty_or_a_switch_is_no_credential(empty: Any) -> None:
    config = {"password": empty}
    assert redact(config) == (config, ())


@pytest.mark.parametrize("secret", ["x", b"x", 1234, 0, ["a", "b"], {"id": 1}])
def test_anything_else_below_such_a_key_is_replaced(secret: Any) -> None:
    assert redact({"secret": secret}) == ({"secret": REDACTED}, ("/secret",))


def test_the_value_itself_is_not_changed_and_what_is_clean_is_shared() -> None:
    clean = {"temperature": 0.5}
    config = {"model": clean, "token": "canary", "pair": ({"pwd": "p"}, 1)}
    value, paths = redact(config)
    assert config["token"] == "canary"
    assert value["model"] is clean
    assert value["pair"] == ({"pwd": REDACTED}, 1)
    assert paths == ("/token", "/pair/0/pwd")


def test_keys_of_ones_own_take_the_place_of_the_default() -> None:
    config = {"ssn": "1", "password": "2"}
    assert redact(config, ["SSN"]) == ({"ssn": REDACTED, "password": "2"}, ("/ssn",))
    assert redact(config, []) == (config, ())
    assert redact(config, ["", "_"]) == (config, ())


def test_keys_that_are_not_text_are_passed_by() -> None:
    assert redact({1: {"token": "t"}}) == ({1: {"token": REDACTED}}, ("/1/token",))


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        ("postgres://me:canary@db/x", "postgres://me:[redacted]@db/x"),
        ("redis://:canary@db", "redis://:[redacted]@db"),
        ("https://h/?a=1&api_key=canary&b=2", "https://h/?a=1&api_key=[redacted]&b=2"),
        ("https://h/?sig=canary", "https://h/?sig=[redacted]"),
        ("API_KEY=canary", "API_KEY=[redacted]"),
        ([["Authorization", "canary"], ["A", "b"]], [["Authorization", REDACTED], ["A", "b"]]),
        ((("Cookie", "canary"),), (("Cookie", REDACTED),)),
        ([{"name": "X-Api-Key", "value": "canary"}], [{"name": "X-Api-Key", "value": REDACTED}]),
        ({"key": "DB_PASSWORD", "value": "canary"}, {"key": "DB_PASSWORD", "value": REDACTED}),
        ({"auth": {"user": "ada", "pwd": "c"}}, {"auth": {"user": "ada", "pwd": REDACTED}}),
    ],
)
def test_what_stands_beside_a_credentials_name_and_in_a_url_is_replaced(
    value: Any, clean: Any
) -> None:
    assert redact({"x": value})[0] == {"x": clean}
    assert redact({"x": value}, ["ssn"]) == ({"x": value}, ())


@pytest.mark.parametrize(
    "value",
    [
        ["password", "reset"],
        "https://me@host:80/x?page=2",
        "the password=x in a sentence",
        "a=b",
        [["a", "b"]],
        {"name": "token"},
    ],
)
def test_a_text_that_only_names_one_is_kept(value: Any) -> None:
    assert redact({"x": value}) == ({"x": value}, ())


def test_what_refers_to_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    with pytest.raises(TooLargeError):
        redact(circle)


@given(
    st.recursive(
        st.just("canary") | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["api_key", "a", "b/c"]), inner, max_size=3)
        ),
    )
)
def test_redacting_twice_changes_nothing_more(value: Any) -> None:
    clean, _ = redact(value)
    assert redact(clean) == (clean, ())
