"""Putting a working context together (S0-15)."""

from __future__ import annotations

from perdure import Message, ToolCall
from perdure.memory.compaction import EpisodicItem, MemoryBundle, SemanticItem
from perdure.memory.context import WorkingContext
from perdure.records.json import decode
from perdure.restore import CompactionSnapshotBuilder
from perdure.restore.rebuild import context_entry, is_memory, prompt_sha256, raw_part

BUNDLE = MemoryBundle(
    (EpisodicItem(id="ep_9", ts=1.0, turn_ids=("turn_0001", "turn_0002"), summary="They met."),),
    (SemanticItem(id="sem_9_1", ts=1.0, fact="Likes herring."),),
)
TAIL = (Message.user("And now?"), Message.assistant("Now we sail."))


def test_the_parts_stand_in_their_order() -> None:
    system, remembered, *raw = CompactionSnapshotBuilder().build("Be kind.", BUNDLE, TAIL)
    assert (system.role, system.text) == ("system", "Be kind.")
    assert remembered.role == "user"
    assert is_memory(remembered)
    assert "They met." in remembered.text
    assert "Likes herring." in remembered.text
    assert "turn_0001 to turn_0002" in remembered.text
    assert tuple(raw) == TAIL


def test_what_is_empty_takes_no_message() -> None:
    assert CompactionSnapshotBuilder().build("", MemoryBundle(), TAIL) == TAIL


def test_the_same_parts_give_the_same_messages() -> None:
    """S0-2."""
    builder = CompactionSnapshotBuilder()
    assert builder.build("p", BUNDLE, TAIL) == builder.build("p", BUNDLE, TAIL)


def test_the_raw_part_is_what_was_said() -> None:
    assert raw_part(CompactionSnapshotBuilder().build("p", BUNDLE, TAIL)) == TAIL
    assert raw_part(()) == ()


def test_a_tail_that_begins_within_a_tools_answer_is_mended() -> None:
    orphaned = (Message.tool("c0", 1), *TAIL)
    assert CompactionSnapshotBuilder().build("", MemoryBundle(), orphaned) == TAIL


def test_the_record_replaces_the_context_it_is_fed_to() -> None:
    """Defect c: a context that is put back is not a compaction, unless the record says so."""
    call = Message.assistant(tool_calls=[ToolCall("c", "look")])
    messages = (Message.system("p"), Message.user("u"), call, Message.tool("c", 1))
    entry = context_entry(
        messages,
        epoch_id=2,
        last_compaction_ts=5.0,
        system_prompt_sha256=prompt_sha256("p"),
        reason="test",
    )
    context = WorkingContext(10_000)
    context.feed(1, "message", b'{"role":"user","content":"gone"}')
    context.feed(2, entry.kind, entry.payload)
    assert [decode(one)["role"] for one in context.messages()] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert (context.epoch_id, context.last_compaction_ts) == (2, 5.0)
    assert context.system_prompt_sha256 == prompt_sha256("p")
