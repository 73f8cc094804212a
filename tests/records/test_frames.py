"""Frames: what was written is read, and nothing else is."""

from __future__ import annotations

import itertools
import json
import zlib

import pytest
from hypothesis import given, strategies as st

from perdure.errors import NotStorableError
from perdure.records import records
from perdure.records.records import Entry, Position, Record, Scanner

KINDS = st.from_regex(r"[A-Za-z][A-Za-z0-9_:.\-]{0,63}", fullmatch=True)
PAYLOADS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value).encode())
ENTRIES = st.lists(st.builds(Entry, KINDS, PAYLOADS, st.booleans()), max_size=12)


BEGIN = Position()


def log_of(entries: list[Entry], *, epoch: int = 3, start: Position = BEGIN) -> bytes:
    return records.encode(entries, first=start.seq + 1, epoch=epoch, crc=start.crc)[0]


def scan(data: bytes, *, epoch: int = 3, start: Position = BEGIN) -> list[Record]:
    return Scanner(epoch, start).feed(data)


def whole(entries: list[Entry]) -> list[Entry]:
    """Return the prefix that consists of whole groups."""
    ends = [place for place, entry in enumerate(entries, 1) if entry.end]
    return entries[: ends[-1]] if ends else []


GROUPS = [
    Entry("message", b'{"a":1}', end=False),
    Entry("message", '{"b":"é\\n"}'.encode()),
    Entry("x:other", b"[]"),
    Entry("message", b'"c"', end=False),
    Entry("turn", b"null"),
]


def test_a_line_is_one_json_object_in_the_documented_form() -> None:
    line = log_of([Entry("message", b'{"text":"hi"}')], epoch=7, start=Position(0, 41, 99))
    assert line.endswith(b"\n")
    body, _, _ = line.rpartition(b',"c":"')
    crc = zlib.crc32(body, 99)
    wanted = {"n": 42, "e": 7, "k": "message", "end": True, "r": {"text": "hi"}, "c": f"{crc:08x}"}
    assert json.loads(line) == wanted
    assert list(json.loads(line)) == list(wanted)


def test_a_record_within_a_group_has_no_end() -> None:
    assert "end" not in json.loads(log_of([Entry("message", b"1", end=False)]))


@given(ENTRIES, st.integers(0, 2**32 - 1), st.integers(0, 10**12), st.lists(st.integers(0, 500)))
def test_whole_groups_come_back_however_the_bytes_arrive(
    entries: list[Entry], crc: int, seq: int, cuts: list[int]
) -> None:
    start = Position(17, seq, crc)
    data = log_of(entries, start=start)
    scanner = Scanner(3, start)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got = [record for a, b in itertools.pairwise(bounds) for record in scanner.feed(data[a:b])]
    wanted = whole(entries)
    assert [Entry(one.kind, one.payload, one.end) for one in got] == wanted
    assert [one.seq for one in got] == list(range(seq + 1, seq + 1 + len(wanted)))
    lines = data.splitlines(keepends=True)[: len(wanted)]
    assert scanner.end.offset == 17 + sum(map(len, lines))
    assert scanner.end.seq == seq + len(wanted)
    assert scanner.next.offset == 17 + len(data)
    assert scanner.damage is None
    # From the end that it knows, reading goes on.
    more = records.encode(GROUPS, first=scanner.end.seq + 1, epoch=3, crc=scanner.end.crc)[0]
    assert len(scan(more, start=scanner.end)) == len(GROUPS)


def test_every_truncation_leaves_a_prefix_of_whole_groups() -> None:
    data = log_of(GROUPS)
    for length in range(len(data) + 1):
        got = scan(data[:length])
        assert len(got) in (0, 2, 3, 5)
        assert got == scan(data)[: len(got)]


def test_every_flipped_bit_is_found() -> None:
    data = log_of(GROUPS)
    good = scan(data)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            scanner = Scanner(3, Position())
            got = scanner.feed(bytes(bad))
            assert got == good[: len(got)]
            assert len(got) < len(good)
            line_begin = data.rfind(b"\n", 0, place) + 1
            assert scanner.next.offset <= line_begin


def test_a_page_that_was_lost_within_a_long_line_is_damage() -> None:
    """Whole lines come with it, in one read, and more of its own line comes behind it."""
    data = log_of(GROUPS)
    scanner = Scanner(3, Position())
    scanner.feed(data + b"4" + bytes(8) + b"x" * (len(data) + 50))
    assert scanner.damage == len(data)


def rest_of(data: bytes) -> bytes:
    """Return a file's bytes from the first line on that is not the next record."""
    scanner = Scanner(3, Position())
    scanner.feed(data)
    return data[scanner.next.offset :]


def test_a_flip_in_a_whole_line_is_told_from_a_write_that_was_cut() -> None:
    data = log_of(GROUPS)
    for place in range(len(data) - 1):  # without its line break, the last line is not whole
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            assert not records.is_cut_write(rest_of(bytes(bad))), (place, bit)


def test_a_write_that_was_cut_is_not_taken_for_damage() -> None:
    data = log_of(GROUPS)
    for length in range(len(data)):
        for tear in (b"", b"\0" * 40 + b"\n", b"\0" * 512, b"\0" * 40 + b"\n" + b"\0" * 40):
            assert records.is_cut_write(rest_of(data[:length] + tear))


def test_what_no_crash_leaves_is_damage() -> None:
    data = log_of(GROUPS)
    lines = data.splitlines(keepends=True)
    for bad in (
        data.replace(b"\n", b"\r\n"),
        data.decode().encode("utf-16"),
        data.decode().encode("utf-32"),
        b"".join(lines[1:]),
        data + b"garbage\n",
        data + b"\0" * 40 + b"\ngarbage\n",
        data[:20] + b"\0" * 40 + data[60:],
    ):
        assert not records.is_cut_write(rest_of(bad))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_that_a_tool_for_text_has_converted_can_be_salvaged(encoding: str, end: str) -> None:
    data = log_of(GROUPS)
    converted = data.decode().replace("\n", end).encode(encoding)
    assert bool(records.conversion_of(converted)) is (converted != data)
    assert records.unconverted(converted) == data


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: lines[::-1],
        lambda lines: [lines[0], *lines],
        lambda lines: [lines[0], *lines[2:]],
    ],
)
def test_lines_at_another_place_do_not_count(change) -> None:
    lines = log_of(GROUPS).splitlines(keepends=True)
    assert len(scan(b"".join(change(lines)))) < len(GROUPS)


def test_lines_of_another_epoch_seed_or_number_do_not_count() -> None:
    data = log_of(GROUPS)
    assert scan(data, epoch=4) == []
    assert scan(data, start=Position(0, 0, 1)) == []
    assert scan(data, start=Position(0, 1, 0)) == []


def test_a_line_with_a_right_checksum_and_a_wrong_form_does_not_count() -> None:
    for body in (
        b'{"n":1,"e":3,"k":"m","r":',  # no payload
        b'{"n":01,"e":3,"k":"m","r":1',
        b'{"n":1,"e":3,"k":"","r":1',
        b'{"n":1,"e":3,"k":"m","end":false,"r":1',
        b'{"e":3,"n":1,"k":"m","r":1',
        b'{"n":1, "e":3,"k":"m","r":1',
        b'{"n":-1,"e":3,"k":"m","r":1',
        b"",
    ):
        line = b'%b,"c":"%08x"}\n' % (body, zlib.crc32(body))
        scanner = Scanner(3, Position())
        assert scanner.feed(line) == []
        assert scanner.damage == 0


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_accident(data: bytes) -> None:
    scanner = Scanner(3, Position())
    assert scanner.feed(data) == []
    assert scanner.feed(b"\n") == []
    records.is_cut_write(data)
    records.conversion_of(data)
    records.unconverted(data)
    records.open_sealed(data)
    records.first_payload(data)


def test_nesting_does_not_matter_since_nothing_is_decoded() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    (record,) = scan(log_of([Entry("message", deep)]))
    assert record.payload == deep


@pytest.mark.parametrize("kind", ["", "1a", "a b", 'a"b', "a\nb", "é", "a" * 65])
def test_a_kind_that_is_no_name_is_refused(kind: str) -> None:
    with pytest.raises(NotStorableError):
        log_of([Entry(kind, b"1")])


def test_a_payload_of_two_lines_is_refused() -> None:
    with pytest.raises(NotStorableError, match="line break"):
        log_of([Entry("message", b'{\n"a":1}')])


def test_a_payload_cannot_pass_for_the_end_of_its_line() -> None:
    payload = b'1,"c":"00000000"}'
    (record,) = scan(log_of([Entry("message", payload)]))
    assert record.payload == payload


def test_a_line_without_an_end_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    scanner = Scanner(3, Position())
    for _ in range(5):
        scanner.feed(b"x" * 300)
    assert scanner.damage == 0


def test_a_sealed_object_comes_back_and_every_flip_is_found() -> None:
    document = b'{"a":[1,2],"b":"c"}'
    sealed = records.seal(document)
    assert json.loads(sealed)["a"] == [1, 2]
    assert records.open_sealed(sealed) == document
    for place in range(len(sealed)):
        for bit in range(8):
            bad = bytearray(sealed)
            bad[place] ^= 1 << bit
            assert records.open_sealed(bytes(bad)) is None
        assert records.open_sealed(sealed[:place]) is None
