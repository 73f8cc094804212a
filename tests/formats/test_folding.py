"""The two ways between a log and a state undo one another, whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure import CorruptRecordError, UnsupportedVersionError
from perdure.formats.migrations import read_state
from perdure.formats.records import log_in, state_of, unfold, with_log
from perdure.formats.state import FullAgentState, write_state
from perdure.memory.context import RetractionPayload
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, MESSAGE, RETRACT, Entry, Record
from tests.formats.samples import MEMORY, SESSION, copy_of

KEY = SessionKey("my-assistant")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)
unknown = st.dictionaries(st.text(min_size=1).map(lambda name: "x-" + name), values, max_size=2)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.text()}
)
items = st.one_of(messages, unknown.map(lambda extra: {"role": "user", **extra}), values)


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    session, memory = copy_of(SESSION), copy_of(MEMORY)
    context = session["context"]
    context["plugins"] = {}
    context["core"]["history"] = draw(st.lists(items, max_size=5))
    context["core"]["systemPrompt"] = draw(st.sampled_from(["", "P"]))
    entry = memory["entries"][0]
    entry["value"] = draw(values)
    session["plugins"] = draw(st.dictionaries(st.sampled_from("abc"), values.filter(bool)))
    session["memory"] = memory
    for place in (session, context, context["core"], session["metadata"], memory, entry):
        place.update(draw(unknown))
    return session


def log_of(entries: tuple[Entry, ...]) -> list[Record]:
    epoch = Record(1, 1, EPOCH, b'{"owner":"o","at":1800000000.0}', end=True)
    rest = [Record(seq, 1, *entry) for seq, entry in enumerate(entries, 2)]
    return [epoch, *rest]


def read(session: Any) -> FullAgentState:
    state = read_state(json.dumps(session).encode()).state
    assert state is not None
    return state


@pytest.mark.deep
@given(sessions())
def test_a_state_that_became_a_log_is_folded_to_itself(session: dict[str, Any]) -> None:
    state = read(session)
    unfolded = unfold(state, now=0.0)
    if any(one.what == "redacted" for one in unfolded.findings):
        return
    assert write_state(state_of(KEY, log_of(unfolded.entries))) == write_state(state)


@st.composite
def logs(draw: st.DrawFn) -> list[Record]:
    """Draw a log of some epochs, with retractions to any earlier record."""
    entries: list[Entry] = []
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["message", "message", "retract", "epoch", "other"]))
        if kind == "message":
            payload = json.dumps(draw(messages)).encode()
            entries.append(Entry(MESSAGE, payload, draw(st.booleans())))
        elif kind == "retract":
            after = draw(st.integers(0, len(entries) + 1))
            entries.append(Entry(RETRACT, msgspec.json.encode(RetractionPayload(after))))
        elif kind == "epoch":
            entries.append(Entry(EPOCH, b'{"owner":"o"}'))
        else:
            entries.append(Entry("app:own", json.dumps(draw(values)).encode()))
    records, epoch = [Record(1, 1, EPOCH, b'{"owner":"o"}', end=True)], 1
    for seq, entry in enumerate(entries, 2):
        epoch += entry.kind == EPOCH
        records.append(Record(seq, epoch, *entry))
    return records


@given(logs())
def test_a_log_comes_back_from_its_state_record_for_record(records: list[Record]) -> None:
    state = with_log(state_of(KEY, records), KEY, records)
    again = read_state(msgspec.json.format(write_state(state), indent=2)).state
    assert again is not None
    log = log_in(again)
    assert log is not None
    assert log.agrees
    assert list(log.records) == records


def test_a_log_of_a_newer_release_is_refused() -> None:
    records = log_of(unfold(read(SESSION), now=0.0).entries)
    state = with_log(state_of(KEY, records), KEY, records)
    told = json.loads(write_state(state))
    told["perdure"]["format"] = 3
    with pytest.raises(UnsupportedVersionError, match="newer release"):
        log_in(read(told))


def test_a_log_that_lacks_an_item_is_damaged() -> None:
    records = log_of(unfold(read(SESSION), now=0.0).entries)
    state = with_log(state_of(KEY, records), KEY, records)
    told = json.loads(write_state(state))
    told["perdure"]["log"].append({"kind": "message"})
    with pytest.raises(CorruptRecordError, match="lacks the payload"):
        log_in(read(told))


def test_a_state_of_others_carries_no_log() -> None:
    assert log_in(read(SESSION)) is None
