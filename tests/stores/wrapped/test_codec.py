"""The codecs by themselves: what they encode comes back, in its own place and in no other."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Batch, FoldedDocument, Manifest
from perdure.records.posts import DeadLetter, PendingItem
from perdure.records.records import EPOCH, MESSAGE, Entry, Record
from perdure.stores.wrapped.chain import ChainLink, ChainWriter, RecordChain
from perdure.stores.wrapped.compressed import Compression, _CompressionTransform
from perdure.stores.wrapped.keys import DataKey
from perdure.stores.wrapped.manifests import inner_documents
from perdure.stores.wrapped.transform import (
    Transform,
    restore_item,
    restore_letter,
    restore_records,
    transform_batch,
    transform_item,
    transform_letter,
)

ADA, EVE = SessionKey("ada"), SessionKey("eve")


@cache
def codecs() -> dict[str, Transform]:
    owner = ("session", "", "ada", "default")
    return {
        "encrypted": DataKey(b"k" * 32, owner, None),
        "packed and encrypted": DataKey(b"p" * 32, owner, Compression()),
        "packed": _CompressionTransform(Compression(), owner),
    }


@pytest.fixture(params=["encrypted", "packed and encrypted", "packed"], scope="module")
def codec(request: pytest.FixtureRequest) -> Transform:
    return codecs()[request.param]


@pytest.fixture(params=["encrypted", "packed and encrypted"], scope="module")
def sealing(request: pytest.FixtureRequest) -> Transform:
    return codecs()[request.param]


place = st.tuples(st.sampled_from(["record", "blob", "document"]), st.integers() | st.text())
data = st.binary(max_size=600) | st.integers(1, 9).map(lambda times: b"again " * 300 * times)
payload = data.map(lambda some: json.dumps(some.decode("latin-1")).encode()) | st.just(
    b'"~zstd~AAAA"'
)
step = st.text(min_size=1, max_size=80)


@given(place=place, data=data)
def test_bytes_come_back_and_are_always_the_same(
    codec: Transform, place: tuple[Any, ...], data: bytes
) -> None:
    stored = codec.transform(place, data)
    assert codec.restore(place, stored) == data
    assert codec.transform(place, data) == stored


@given(place=place, other=place, data=data, at=st.integers(0), bit=st.integers(0, 7))
def test_what_is_sealed_fits_its_place_alone_and_no_bit_of_it_may_change(
    sealing: Transform,
    place: tuple[Any, ...],
    other: tuple[Any, ...],
    data: bytes,
    at: int,
    bit: int,
) -> None:
    stored = bytearray(sealing.transform(place, data))
    if other != place:
        with pytest.raises(CorruptRecordError):
            sealing.restore(other, bytes(stored))
    stored[at % len(stored)] ^= 1 << bit
    with pytest.raises(CorruptRecordError):
        sealing.restore(place, bytes(stored))


@given(one=data, other=data)
def test_a_nonce_is_of_place_and_content(sealing: Transform, one: bytes, other: bytes) -> None:
    """Two contents of one place have two, and so has one content in two places."""
    nonces = {
        sealing.transform(place, content)[9:21]
        for place in (("record", 1), ("record", 2))
        for content in (one, other)
    }
    assert len(nonces) == 2 * len({one, other})


@given(payloads=st.lists(st.tuples(payload, st.booleans()), min_size=1, max_size=5))
def test_a_batch_comes_back_as_records_and_its_payloads_stay_json(
    codec: Transform, payloads: list[tuple[bytes, bool]]
) -> None:
    entries = tuple(Entry(MESSAGE, payload, end) for payload, end in payloads)
    stored = transform_batch(codec, Batch(ADA, 3, 7, entries))
    assert all(json.loads(entry.payload) is not None for entry in stored.records)
    records = [Record(seq, 3, *entry) for seq, entry in enumerate(stored.records, 7)]
    assert [Entry(*one) for one in map(entry_of, restore_records(codec, records))] == [*entries]


def entry_of(record: Record) -> tuple[str, bytes, bool]:
    return record.kind, record.payload, record.end


@given(payload=payload, reason=st.text(), damage=st.text(max_size=3))
def test_posts_and_dead_letters_come_back(
    codec: Transform, payload: bytes, reason: str, damage: str
) -> None:
    item = PendingItem("op", MESSAGE, payload, 1.0, damage=damage)
    if not damage:
        assert restore_item(codec, ADA, transform_item(codec, ADA, item)) == item
    letter = DeadLetter(item, reason, 5, 2.0)
    stored = transform_letter(codec, ADA, letter)
    assert restore_letter(codec, ADA, stored, by_key=False) == letter


@given(payload=payload)
def test_a_post_of_another_session_is_damaged(sealing: Transform, payload: bytes) -> None:
    stored = transform_item(sealing, ADA, PendingItem("op", MESSAGE, payload, 1.0))
    moved = restore_item(sealing, EVE, stored)
    assert moved.damage
    assert moved.payload == stored.payload
    letter = transform_letter(sealing, ADA, DeadLetter(moved, "hidden", 5, 2.0))
    assert restore_letter(sealing, EVE, letter, by_key=False).item.damage


@given(
    name=st.lists(step, min_size=1, max_size=3).map("/".join),
    ending=st.sampled_from(["", ".json", ".jsonl"]),
)
def test_what_comes_after_a_documents_folder_is_hidden(
    sealing: Transform, name: str, ending: str
) -> None:
    name += ending
    stored = sealing.stored_name(name)
    assert sealing.plain_name(stored) == name
    assert sealing.stored_name(name) == stored
    assert sealing.plain_name(name) == name  # of before
    folder, slash, rest = name.partition("/")
    assert stored.startswith(f"{folder}{slash}")
    if rest:
        assert stored.endswith(ending)
        token = stored.removeprefix(f"{folder}/").removesuffix(ending)
        assert token.isalnum()
        assert len(rest) < 4 or rest.lower() not in token
    else:
        assert stored == name


def test_equal_names_of_two_sessions_do_not_look_equal() -> None:
    other = DataKey(b"o" * 32, ("session", "", "eve", "default"), None)
    names = {one.stored_name("state/a.json") for one in (other, codecs()["encrypted"])}
    assert len(names) == 2
    assert other.plain_name(codecs()["encrypted"].stored_name("state/a.json")) != "state/a.json"


@given(text=st.text(), other=st.text())
def test_labels_are_tokens(sealing: Transform, text: str, other: str) -> None:
    assert (sealing.token(text) == sealing.token(other)) == (text == other)


class Log:
    """Batches as a holder writes them, and the records that the inner store has."""

    def __init__(self) -> None:
        self.chain = RecordChain(codecs()["encrypted"], b"s" * 32, 1)
        self.records: list[Record] = []
        self.link = self.chain.start

    def epoch(self, epoch: int) -> ChainWriter:
        record = Record(self.link.seq + 1, epoch, EPOCH, b'{"owner":"x"}', end=True)
        self.link = self.chain.next_link(self.link, record)
        self.records.append(record)
        writer = ChainWriter(self.chain, epoch, self.link.seq, 0)
        writer.note_link(self.link)
        return writer

    def append(self, writer: ChainWriter, payloads: list[bytes]) -> Batch:
        entries = tuple(Entry(MESSAGE, payload, end=True) for payload in payloads)
        plain = Batch(ADA, writer.epoch, self.link.seq + 1, entries)
        stored = writer.encrypt(plain)
        assert writer.encrypt(plain) == stored  # sent again
        self.records += [
            Record(seq, writer.epoch, *entry)
            for seq, entry in enumerate(stored.records, plain.first)
        ]
        link = writer.link(self.records[-1].seq)
        assert link is not None
        self.link = link
        return stored


@given(
    holders=st.lists(st.lists(st.lists(payload, min_size=1, max_size=3), max_size=3), min_size=1)
)
def test_each_record_has_the_link_before_it(holders: list[list[list[bytes]]]) -> None:
    log = Log()
    for epoch, batches in enumerate(holders, 1):
        writer = log.epoch(epoch)
        for batch in batches:
            log.append(writer, batch)
    written = [payload for batches in holders for batch in batches for payload in batch]
    link, read = log.chain.start, []
    for record in log.records:
        if record.kind != EPOCH:
            linked = log.chain.decrypt(record)
            assert linked.before == link
            read.append(linked.record.payload)
        link = log.chain.next_link(link, record)
    assert (read, link) == (written, log.link)


@given(
    at=st.integers(0, 3),
    field=st.sampled_from(["seq", "epoch", "kind", "payload", "end"]),
)
def test_a_link_is_of_all_that_a_record_has(at: int, field: str) -> None:
    log = Log()
    log.append(log.epoch(1), [b'"a"', b'"b"', b'"c"'])
    record = log.records[at]
    other: dict[str, Any] = {"seq": 9, "epoch": 9, "kind": "x:y", "payload": b'"z"'}
    fields = {name: getattr(record, name) for name in ("seq", "epoch", "kind", "payload", "end")}
    changed = Record(**{**fields, field: other.get(field, not record.end)})
    before = ChainLink(record.seq - 1, b"l" * 16)
    assert log.chain.next_link(before, record).digest != log.chain.next_link(before, changed).digest


@given(
    listed=st.dictionaries(st.sampled_from(["a.json", "state/a.json", "state/b.json"]), data),
    written=st.sets(st.sampled_from(["a.json", "state/a.json", "state/b.json"])),
)
def test_an_inner_manifest_lists_what_is_stored(
    sealing: Transform, listed: dict[str, bytes], written: set[str]
) -> None:
    documents = {name: FoldedDocument.of(4, content) for name, content in listed.items()}
    manifest = Manifest(key=ADA, epoch=1, as_of_seq=4, documents=documents)
    names = {name: sealing.stored_name(name) for name in listed}
    encoded = {
        names[n]: sealing.transform(("folded", n), listed[n]) for n in written & listed.keys()
    }
    known = {names[name]: FoldedDocument.of(2, b"before") for name in listed}
    inner = inner_documents(manifest, names, encoded, known)
    assert inner.keys() == set(names.values())
    for stored in names.values():
        expected = FoldedDocument.of(4, encoded.get(stored, b"before")).sha256
        assert inner[stored].sha256 == expected
        assert inner[stored].as_of_seq == 4
