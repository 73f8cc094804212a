"""The model that follows a script."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from perdure import ConfigError, Message, ToolCall
from perdure.agent.llm import Chunk, EchoModel, ScriptedModel, call
from perdure.agent.llm.model import ReplyStream, Usage


async def answer(model: ScriptedModel, *messages: Message) -> Message:
    reply = ReplyStream()
    async for chunk in model.stream(messages, ()):
        reply.take(chunk)
    return reply.message()


async def test_replies_come_once_each_in_order() -> None:
    model = ScriptedModel("one", "two")
    assert [(await answer(model)).text, (await answer(model)).text] == ["one", "two"]
    with pytest.raises(ConfigError, match="at its end after 2 answers"):
        await answer(model)


async def test_text_comes_in_chunks() -> None:
    model = ScriptedModel("abcdefg", chunk_chars=3)
    texts = [chunk.text async for chunk in model.stream((), ()) if chunk.text]
    assert texts == ["abc", "def", "g"]


async def test_a_function_answers_everything_that_comes_after() -> None:
    def count(messages: Sequence[Message]) -> str:
        return f"{len(messages)} so far"

    model = ScriptedModel("first", count)
    assert (await answer(model)).text == "first"
    assert (await answer(model, Message.user("x"))).text == "1 so far"
    assert (await answer(model)).text == "0 so far"


async def test_calls_get_ids_that_follow_from_the_conversation() -> None:
    said = (Message.user("x"), Message.user("y"))
    first = await answer(ScriptedModel([call("add", a=1), call("add", a=2)]), *said)
    again = await answer(ScriptedModel([call("add", a=1), call("add", a=2)]), *said)
    assert first == again
    assert [one.id for one in first.tool_calls] == ["call_2_0", "call_2_1"]
    assert first.tool_calls[1].arguments == {"a": 2}


async def test_an_id_of_ones_own_stays() -> None:
    (made,) = (await answer(ScriptedModel(ToolCall("mine", "add")))).tool_calls
    assert made.id == "mine"


async def test_a_whole_message_comes_with_all_its_parts() -> None:
    message = Message(
        role="assistant",
        content="text",
        reasoning="because",
        tool_calls=(ToolCall("c", "add"),),
        extra={"signature": msgspec.Raw(b'"s"')},
    )
    assert await answer(ScriptedModel(message)) == message


async def test_an_error_comes_after_what_was_said_before() -> None:
    class Lost(Exception):
        pass

    with pytest.raises(Lost):
        await answer(ScriptedModel(Lost()))


async def test_chunks_come_as_they_are() -> None:
    reply = await answer(ScriptedModel([Chunk(reasoning="hm"), Chunk(text="well"), call("add")]))
    assert (reply.reasoning, reply.text, reply.tool_calls[0].name) == ("hm", "well", "add")


async def test_the_echo_repeats_the_user() -> None:
    assert (await answer(EchoModel(), Message.user("hello"))).text == "You said: hello"


def test_a_script_without_replies_is_refused() -> None:
    with pytest.raises(ConfigError, match="no script"):
        ScriptedModel()


def test_what_came_before_an_interruption_is_marked() -> None:
    reply = ReplyStream()
    reply.take(Chunk(text="I was go", tool_calls=(ToolCall("c", "add"),)))
    partial = reply.partial()
    assert partial is not None
    assert (partial.text, partial.tool_calls) == ("I was go", ())
    assert bytes(partial.extra["perdure_interrupted"]) == b"true"
    assert ReplyStream().partial() is None


def test_a_whole_message_stays_whatever_follows() -> None:
    stream = ReplyStream()
    stream.take(Chunk(message=Message.assistant("whole")))
    stream.take(Chunk(usage=Usage(input_tokens=1)))
    assert stream.message().content == "whole"


def test_an_answer_without_text_has_none_only_beside_calls() -> None:
    call = ToolCall("c1", "add", {})
    for calls, content in (((call,), None), ((), "")):
        stream = ReplyStream()
        stream.take(Chunk(tool_calls=calls))
        assert stream.message().content == content
