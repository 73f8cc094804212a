"""Names on disk: every id has its own, and none leads anywhere else."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, strategies as st

from perdure.errors import NotStorableError
from perdure.records.keys import SessionKey
from perdure.stores.file.layout import (
    LEASE,
    MANIFEST,
    MANIFESTS,
    NEXT_MANIFEST,
    decode_name,
    document_path,
    encode_name,
    epoch_in,
    segment_name,
    segment_of,
    session_path,
)

IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
SAFE = re.compile(r"[a-z0-9_\-=~]+\Z")
RESERVED = ("con", "prn", "aux", "nul", "com0", "com1", "com9", "lpt0", "lpt9")


@given(IDS)
@example("..")
@example("/")
@example("a\\b")
@example("CON")
@example("nul")
@example("x" * 151)
@example("é" * 512)
def test_a_name_is_one_safe_step(text: str) -> None:
    name = encode_name(text)
    assert SAFE.match(name)
    assert len(name) <= 150
    assert name not in RESERVED
    assert name == name.lower()
    assert unicodedata.normalize("NFC", name) == name


@given(IDS, IDS)
def test_no_two_ids_share_a_name(one: str, other: str) -> None:
    assert (encode_name(one) == encode_name(other)) is (one == other)


@given(IDS)
def test_a_name_that_is_not_cut_gives_the_id_back(text: str) -> None:
    name = encode_name(text)
    assert decode_name(name) == (None if "~" in name else text)


@pytest.mark.parametrize("name", ["=zz", "A", "a.b", "=6a", "con", "=ff", "a~b", "=c3", "x" * 151])
def test_a_name_that_encoding_never_gives_is_no_id(name: str) -> None:
    assert decode_name(name) is None


def test_ids_that_a_careless_disk_would_join_stay_apart() -> None:
    ids = ["a", "A", "é", "e\u0301", "a.", "a", "a ", "con", "CON", "x" * 151, "x" * 152, "=41"]
    assert len({encode_name(text) for text in ids}) == len(set(ids))


def test_plain_ids_stay_readable() -> None:
    assert encode_name("my-assistant_2") == "my-assistant_2"
    assert encode_name("con") == "=63on"
    long = encode_name("x" * 1024)
    assert re.fullmatch(r"x{60}~[a-z2-7]{52}", long)


def test_the_default_session_lies_at_the_agent() -> None:
    assert session_path(SessionKey("a")) == ("agents", "a")
    assert session_path(SessionKey("a", "B")) == ("agents", "a", "sessions", "=42")
    assert session_path(SessionKey("a", tenant="t")) == ("tenants", "t", "agents", "a")


@given(IDS, IDS, IDS, IDS, IDS, IDS)
def test_no_two_keys_share_a_folder(a: str, b: str, c: str, d: str, e: str, f: str) -> None:
    def key(*parts: str) -> SessionKey | None:
        clean = [
            "".join(char for char in part if ord(char) > 31 and ord(char) != 127) for part in parts
        ]
        return SessionKey(*clean) if all(clean) else None

    one, other = key(a, b, c), key(d, e, f)
    if one and other:
        assert (session_path(one) == session_path(other)) is (one == other)


def test_documents_keep_their_ending() -> None:
    assert document_path("session.json") == ("session.json",)
    assert document_path("episodic.jsonl") == ("episodic.jsonl",)
    assert document_path("state/My key.json") == ("state", "=4dy=20key.json")
    assert document_path("state/../x.json") == ("state", "=2e=2e", "x.json")
    assert document_path("plugins/con.json") == ("plugins", "=63on.json")


@pytest.mark.parametrize(
    "name",
    ["log", "log/1-0.jsonl", "sessions/x.json", "quarantine/x.json", "files/a.json"]
    + ["lease-1.json", "manifest-1.json", "lease-1.released"],
)
def test_no_document_takes_the_place_of_the_store_s_own_files(name: str) -> None:
    steps = document_path(name)
    assert steps[0] not in {"log", "sessions", "quarantine", "files"}
    assert not LEASE.epoch(steps[0])
    assert not epoch_in(steps[0], MANIFESTS)


@given(st.lists(IDS, min_size=1, max_size=3), st.lists(IDS, min_size=1, max_size=3))
@example(["a"], ["a", "b.json"])
@example(["a.json"], ["a.json", "b"])
@example(["log"], ["=6cog"])
def test_no_two_documents_share_or_cover_a_place(one: list[str], other: list[str]) -> None:
    a, b = "/".join(one), "/".join(other)
    try:
        first, second = document_path(a), document_path(b)
    except NotStorableError:
        assert "" in f"{a}/{b}".split("/")
        return
    assert (first == second) is (a == b)
    if a != b:
        assert second[: len(first)] != first
        assert first[: len(second)] != second


@pytest.mark.parametrize("name", ["", "/", "a//b", "/a", "a/"])
def test_a_document_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(NotStorableError):
        document_path(name)


def test_files_are_known_by_their_names() -> None:
    assert LEASE.epoch(LEASE.name(12)) == 12
    assert MANIFEST.epoch(MANIFEST.name(3)) == 3
    assert NEXT_MANIFEST.epoch(NEXT_MANIFEST.name(3)) == 3
    assert segment_of(segment_name(4, 10)) == (4, 10)
    for name in ("lease-0.json", "lease-01.json", "lease-1.jsonx", "1-01.jsonl", "1-0.json", "x"):
        assert not LEASE.epoch(name)
        assert segment_of(name) is None
        assert not epoch_in(name, MANIFESTS)
