"""A manifest is read, refused or counted as lost by its bytes alone."""

from __future__ import annotations

import msgspec
import pytest

from perdure.errors import UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Manifest, decode_manifest

MANIFEST = Manifest(key=SessionKey("ada"), epoch=1, as_of_seq=3)


def test_a_manifest_is_read() -> None:
    assert decode_manifest(msgspec.json.encode(MANIFEST), "it") == MANIFEST


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"no JSON",
        b"[]",
        b"{}",
        b'{"format":"2"}',
        b'{"key":{"agent":"\\n","session":"x"},"epoch":1,"as_of_seq":1}',
    ],
)
def test_one_that_is_damaged_counts_as_lost(body: bytes | None) -> None:
    assert decode_manifest(body, "it") is None


@pytest.mark.parametrize("more", [{}, {"epoch": "one", "key": None}])
def test_a_newer_format_is_refused_whatever_its_shape(more: dict[str, object]) -> None:
    newer = {**msgspec.json.decode(msgspec.json.encode(MANIFEST)), "format": FORMAT + 1, **more}
    with pytest.raises(UnsupportedVersionError, match="the manifest of ada has format"):
        decode_manifest(msgspec.json.encode(newer), "the manifest of ada", key="ada")
