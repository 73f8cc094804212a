"""What the user has encoded is checked once, and then goes as it is."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import NotStorableError, TooLargeError
from perdure.records.json import MAX_PAYLOAD_DEPTH
from perdure.records.messages import RESERVED_KINDS, EncodedRecord, Message, encode_message
from perdure.records.records import Entry


def test_the_entry_is_ready_and_holds_the_very_bytes() -> None:
    payload = b'{"a":1.0,"a" : "\\u00e9"}'
    encoded = EncodedRecord("app:rating", payload)
    assert encoded.entry == Entry("app:rating", payload, True)
    assert encoded.entry.payload is payload
    assert encoded.entry is encoded.entry
    assert (encoded.kind, encoded.payload) == ("app:rating", payload)


@pytest.mark.parametrize("kind", ["a", "happened", "My.Kind-1:x_y", "k" * 64])
def test_a_kind_of_ones_own_is_taken(kind: str) -> None:
    assert EncodedRecord(kind, b"null").kind == kind


@pytest.mark.parametrize("kind", ["", "1a", ":a", "a b", "a\n", "é", "a/b", "k" * 65, None, b"a"])
def test_a_kind_that_does_not_fit_is_refused(kind: Any) -> None:
    with pytest.raises(NotStorableError, match="invalid kind="):
        EncodedRecord(kind, b"null")


@pytest.mark.parametrize("kind", [*sorted(RESERVED_KINDS), "x:Point"])
def test_a_kind_of_perdures_is_refused_with_the_cure(kind: str) -> None:
    with pytest.raises(NotStorableError, match=f"choose another, such as 'app:{kind}'"):
        EncodedRecord(kind, b"{}")


@pytest.mark.parametrize(
    "payload",
    [
        *[b"", b"{", b"{} {}", b'{\n"a":1}', b"1\r", b"NaN", b'"\xff"', b'"\\ud800"', b"1e999"],
        *["{}", bytearray(b"{}"), {"a": 1}, None, b"\x80\x04K\x01."],
    ],
)
def test_a_payload_that_is_not_json_in_one_line_is_refused(payload: Any) -> None:
    with pytest.raises(NotStorableError):
        EncodedRecord("app", payload)


def test_depth_and_size_are_limited() -> None:
    def nested(levels: int) -> bytes:
        return b"[" * levels + b"]" * levels

    EncodedRecord("app", nested(MAX_PAYLOAD_DEPTH))
    for levels in (MAX_PAYLOAD_DEPTH + 1, 201, 100_000):
        with pytest.raises(TooLargeError, match="nests deeper"):
            EncodedRecord("app", nested(levels))
    with pytest.raises(TooLargeError, match="the limit is 16777216"):
        EncodedRecord("app", b'"' + b"x" * 17_000_000 + b'"')


def test_an_encoded_message_is_a_message() -> None:
    entry = encode_message(Message.tool("1", b"x"))
    assert EncodedRecord(entry.kind, entry.payload).entry == entry
    with pytest.raises(NotStorableError, match="not a stored message.*append a Message instead"):
        EncodedRecord("message", b'{"content":"x"}')


def test_its_repr_does_not_show_the_content() -> None:
    assert repr(EncodedRecord("app", b'"canary"')) == "EncodedRecord('app', <8 bytes>)"


def test_equal_means_the_same_record() -> None:
    assert EncodedRecord("a", b"1") == EncodedRecord("a", b"1")
    assert len({EncodedRecord("a", b"1"), EncodedRecord("a", b"1"), EncodedRecord("b", b"1")}) == 2
    assert EncodedRecord("a", b"1") != b"1"
