"""Responses, the newer API of OpenAI, with the conversation sent each time.

Its rules: each output has its call, a reasoning item precedes what it led to and can be read
only from its encrypted content, and items that were issued with reasoning are named by
their ids only if it is there too. Calls are adjacent, with their outputs after them: else the
reasoning counts as missing (community.openai.com, 1355347). What a reasoning item says of its
status is for reading only (issue 13420 of litellm).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from perdure.providers import context_fit, replies
from perdure.providers.context_fit import CallIds, ContextTarget, RenderedContext
from perdure.providers.issued import (
    PLAIN,
    Issued,
    IssuedPart,
    Issuer,
    PlacedPart,
    fields_of,
    laid_out,
    opaque,
    raw,
    sent_stamp,
    stamp_of,
    stamped,
)
from perdure.providers.parts import (
    Media,
    Part,
    Text,
    Unknown,
    content_of,
    image_url,
    note,
    plain,
    read_part,
    shown,
    words_of,
)
from perdure.providers.request_rules import RESPONSES_CALL_ID
from perdure.providers.tool_pairs import ReadExchange, ReadResult
from perdure.records.messages import Extra, Message, ToolCall, ToolResult

FORMAT: Final = "openai-responses"
NATIVE: Final = frozenset({"input_image", "input_file"})
CALLS: Final[dict[str, tuple[str, ...]]] = {
    "function_call": ("arguments",),
    "custom_tool_call": ("input",),
    "local_shell_call": ("action",),
    "shell_call": ("action",),
    "apply_patch_call": ("operation",),
    "computer_call": ("action", "actions"),
}
"""The kinds of calls that the application answers, and what each is given."""
CLIENTS_ALONE: Final = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
"""Those that only the application answers; a shell may be the provider's own."""
OUTPUTS: Final = frozenset(f"{kind}_output" for kind in CALLS)
ROLES: Final = ("system", "developer", "user", "assistant")
_TEXT_IN: Final = {
    "output_text": "text",
    "input_text": "text",
    "text": "text",
    "refusal": "refusal",
}
"""The kinds of parts with words in them, and the field that has them."""
ECHO: Final = frozenset(
    {
        "background",
        "conversation",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "output",
        "output_text",
        "parallel_tool_calls",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "store",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)
"""Fields that a response repeats of its request: the prompt and all tools, each time."""
Block = dict[str, Any]


def render(said: Sequence[ReadExchange], target: ContextTarget) -> RenderedContext:
    """Return a conversation as the input items of a request."""
    ids = CallIds(RESPONSES_CALL_ID, unique=True)
    items: list[Block] = []
    for exchange in said:
        head, own, results = _answerable(exchange) if exchange.results else exchange
        if head.role != "assistant":
            items.append(_given(head, own))
            continue
        call_ids = ids.of(head.tool_calls)
        items_said = _assistant(head, call_ids, own)
        items += items_said
        kinds = {item.get("call_id"): _kind(item) for item in items_said if _kind(item) in CALLS}
        for answer in results:
            call_id = call_ids[answer.at]
            items.append(_output(answer, call_id, kinds.get(call_id, "function_call")))
    return RenderedContext(target.format, items)


def _answerable(exchange: ReadExchange) -> ReadExchange:
    """Return an exchange without calls of a computer that no picture came of: nothing else can."""
    head, own, results = exchange
    if own is None or not any(
        b'"computer_call"' in bytes(item.block) for item in own.items if item.call
    ):
        return exchange
    computers = {
        item.call
        for item in own.items
        if msgspec.json.decode(item.block).get("type") == "computer_call"
    }
    pictures = {
        answer.at
        for answer in results
        if answer.own is not None and answer.own.shape == "computer_call_output"
        if isinstance(answer.result.result, list)
    }
    kept = [
        at for at, call in enumerate(head.tool_calls) if call.id not in computers or at in pictures
    ]
    calls = tuple(head.tool_calls[at] for at in kept)
    left = [one._replace(at=kept.index(one.at)) for one in results if one.at in kept]
    return ReadExchange(msgspec.structs.replace(head, tool_calls=calls), own, left)


def _given(message: Message, own: Issued | None) -> Block:
    """Return what the user or the instructions say."""
    if own is None or not own.sent:
        return {"role": message.role, "content": content_of(message, part_block)}
    item = {"role": own.role or message.role, "content": message.content}
    return {**opaque(message.extra), **item}


def _assistant(message: Message, call_ids: Sequence[str], own: Issued | None) -> list[Block]:
    if own is not None and own.items:
        placed = laid_out(message, own)
        signed = sum(item.block != PLAIN for item in own.items)
        is_whole = sum(bool(part.block) for part in placed) == signed
        items = [_own_item(part, message, call_ids) for part in placed]
        items = [_without_status(one) if _kind(one) == "reasoning" else one for one in items]
        items = [one for one in items if _kind(one) != "message" or _says(one)]
        answered = _answered(items, call_ids)
        is_answered = all(item.get("call_id") in answered for item in items)
        if own.sent and is_whole and is_answered:
            end = max(
                (at for at, part in enumerate(items, 1) if _kind(part) != "reasoning"), default=0
            )
            return items[:end]  # what has led to nothing is refused
        return _sound(items, call_ids, is_whole=is_whole)
    text = context_fit.clean(words_of(message))
    items_said = [{"role": "assistant", "content": text}] if text else []
    calls = zip(message.tool_calls, call_ids, strict=True)
    return [*items_said, *(_call(call, call_id, {}) for call, call_id in calls)]


def _own_item(placed: PlacedPart, message: Message, call_ids: Sequence[str]) -> Block:
    block = placed.block
    if placed.call is not None:
        call = message.tool_calls[placed.call]
        return _call(call, call_ids[placed.call], block)
    if not placed.texts:
        return block
    if not block:
        return {"role": "assistant", "content": context_fit.clean("".join(placed.texts))}
    if isinstance(block["content"], str):
        return {**block, "content": context_fit.clean("".join(placed.texts))}
    texts = iter(placed.texts)
    return {**block, "content": [_with_text(part, texts) for part in block["content"]]}


def _with_text(part: Block, texts: Iterator[str]) -> Block:
    field = _TEXT_IN.get(part.get("type", ""))
    # A refusal that was stored by an earlier release has its words still in it.
    if field is None or part.get(field):
        return part
    return {**part, field: context_fit.clean(next(texts, ""))}


def _sound(items: list[Block], call_ids: Sequence[str], *, is_whole: bool) -> list[Block]:
    """Leave out what cannot be sent back, and the ids that went with it.

    That is reasoning that cannot be read, or led to nothing, or to a call that is gone; and calls
    that cannot be answered here, since they are no functions: of a computer, of a shell.
    """
    answered = _answered(items, call_ids)
    sound: list[Block] = []
    for item in reversed(items):
        if _kind(item) == "reasoning":
            fits = is_whole and bool(sound) and bool(item.get("encrypted_content"))
        else:
            fits = item.get("call_id") in answered
        if fits:
            sound.append(item)
    sound.reverse()
    if len(sound) == len(items):
        return sound
    return [bare for item in sound if (bare := _without_id(item, call_ids)) is not None]


def _answered(items: Sequence[Block], call_ids: Sequence[str]) -> set[str | None]:
    """Return the ids of calls that are no functions and have their output among the items."""
    outputs = {item.get("call_id") for item in items if _kind(item).endswith("_output")}
    asked = {item.get("call_id") for item in items if not _kind(item).endswith("_output")}
    return {None, *call_ids, *(outputs & asked)}


def items_of(message: Message) -> list[Block]:
    """Return the items that `parse_history` made a message of, and no request is fitted to.

    A field that the message has no place for is missing: compare with what was parsed.
    """
    own = stamp_of(message)
    result = message.tool_result
    if result is not None:
        return [_sent_output(message, result.call_id, "" if own is None else own.shape or "")]
    if own is None or not own.items:
        return [_given(message, own)]
    call_ids = [call.id for call in message.tool_calls]
    return [_own_item(part, message, call_ids) for part in laid_out(message, own)]


def _kind(item: Block) -> str:
    return str(item.get("type", "message" if "role" in item else "item_reference"))


def _says(item: Block) -> bool:
    content = item.get("content") or ""
    if isinstance(content, str):
        return content != ""
    return any(plain(read_part(part)) for part in content)


def _without_status(item: Block) -> Block:
    return {name: value for name, value in item.items() if name != "status" and value is not None}


def _without_id(item: Block, call_ids: Sequence[str]) -> Block | None:
    """Return an item that is valid without the reasoning it came with; None if none is."""
    if item.get("call_id") in call_ids:
        return {name: value for name, value in item.items() if name != "id"}
    if _kind(item) != "message":
        return None if "id" in item else item
    text = item.get("content")  # a message with its type has to have an id
    if isinstance(text, list):
        text = "".join(plain(read_part(part)) for part in text)
    return {"role": "assistant", "content": text} if text else None


def _call(call: ToolCall, call_id: str, block: Block) -> Block:
    kind = block.get("type", "function_call")
    given = context_fit.arguments_of(call)
    if kind == "function_call":
        text = context_fit.sent_arguments(call) if block else context_fit.text_of(given)
        named = {"name": context_fit.function_name(call.name), "arguments": text}
        return {**block, "type": kind, "call_id": call_id, **named}
    fields = CALLS[kind]
    known: Block = {name: given[name] for name in fields if name in given}
    known = known or ({fields[0]: given} if given else {})
    if kind == "custom_tool_call":
        text = context_fit.text_of(known.get("input", {}))
        known = {"name": context_fit.function_name(call.name), "input": text}
    return {**block, "call_id": call_id, **known}


def _output(answer: ReadResult, call_id: str, kind: str) -> Block:
    """Return what came of a call; codex answers its local shell's calls as functions."""
    _, message, result, own = answer
    shape = f"{kind}_output" if kind != "local_shell_call" else "function_call_output"
    if own is not None and own.sent:
        came = own.shape or shape
        fits = came.startswith(kind) or (kind, came) == ("local_shell_call", shape)
        if fits and result.error is None:
            return _sent_output(message, call_id, came)
    text = context_fit.result_text(result)
    known: Block = {"type": shape, "call_id": call_id}
    if shape == "shell_call_output":
        failed = result.error is not None
        stream = {"stdout": "" if failed else text, "stderr": text if failed else ""}
        return {
            **known,
            "output": [{**stream, "outcome": {"type": "exit", "exit_code": int(failed)}}],
        }
    if shape == "apply_patch_call_output":
        return {
            **known,
            "status": "completed" if result.error is None else "failed",
            "output": text,
        }
    parts = shown(result.result) if result.error is None else None
    fields = {**opaque(message.extra), **opaque(result.extra)} if own and own.sent else {}
    return {
        **fields,
        **known,
        "output": [part_block(part, None) for part, _ in parts or ()] or text,
    }


def _sent_output(message: Message, call_id: str, shape: str) -> Block:
    """Return an output in the shape in which a history had it."""
    result = message.tool_result
    assert result is not None
    fields = {**opaque(message.extra), **opaque(result.extra)}
    kind = shape.removesuffix(_BY_ID) or "function_call_output"
    named = {} if shape.endswith(_BY_ID) else {"call_id": call_id}
    if kind == "apply_patch_call_output" and result.result is None:
        return {**fields, "type": kind, **named}
    is_own = isinstance(result.result, str | list)
    output: Any = result.result if is_own else context_fit.text_of(result.result)
    if kind == "computer_call_output" and isinstance(output, list):
        (output,) = output
    return {**fields, "type": kind, **named, "output": output}


_BY_ID: Final = ":id"
"""The end of the shape of an output that names its call by the item's id alone."""


def part_block(part: Part, source: Any) -> Block:
    """Return a part of a user's content, read from `source`, as a part."""
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {"type": "input_text", "text": context_fit.clean(part.text)}
    block = _media(part)
    native = isinstance(source, dict) and source.get("type") in NATIVE
    takes = block["type"] != "input_text" or part.kind != "image"
    return source if native and takes else block


def _media(media: Media) -> Block:
    url = image_url(media)
    if url is not None:
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if media.kind == "document" and (media.url or "").startswith(("http://", "https://")):
        return {"type": "input_file", "file_url": media.url}
    if media.kind == "document" and media.data:
        name = media.name or "document"
        return {"type": "input_file", "filename": name, "file_data": media.data_url}
    return {"type": "input_text", "text": note(media)}


def parse(reply: Mapping[str, Any] | object, *, issuer: Issuer | str | None = None) -> Message:
    """Return a response as a message.

    What the response repeats of the request (instructions, tools) is left out.

    Raises:
        FormatError: It is none.

    """
    fields = replies.as_dict(reply)
    replies.check_role(FORMAT, fields, "assistant")
    if not isinstance(fields.get("output"), list):
        raise replies.not_a_reply(FORMAT, "its output is no list of items")
    output = replies.listed(FORMAT, fields, "output")
    for item in output:
        replies.check_role(FORMAT, item, "assistant")
    by = replies.issuer_of(FORMAT, issuer, fields.get("model"))
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        items=tuple(_item(item, CLIENTS_ALONE) for item in output),
        reply=fields_of(fields, ECHO | {"model", "object"}),
    )
    calls = tuple(_parsed_call(item) for item in output if item.get("type") in CLIENTS_ALONE)
    return _answer(output, calls, stamped(stamp))


def _answer(
    output: Sequence[Mapping[str, Any]], calls: tuple[ToolCall, ...], extra: Extra
) -> Message:
    texts = [text for item in output for text in _texts(item)]
    thoughts = [text for item in output for text in _thoughts(item)]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="\n\n".join(thoughts) or None,
        tool_calls=calls,
        extra=extra,
    )


def _item(item: Mapping[str, Any], calls: Container[str]) -> IssuedPart:
    kind = item.get("type")
    if kind is not None and kind in calls:
        cut = {"call_id", "name", *CALLS[kind]}
        block = {
            name: value for name, value in item.items() if name not in cut and value is not None
        }
        return IssuedPart(raw(block), call=replies.plain_text(item.get("call_id")))
    texts = _texts(item)
    if not texts:
        return IssuedPart(raw(item))
    content: Any = ""
    if not isinstance(item["content"], str):
        content = [
            {**part, _TEXT_IN[part["type"]]: ""} if part.get("type") in _TEXT_IN else part
            for part in item["content"]
        ]
    return IssuedPart(raw({**item, "content": content}), texts=tuple(map(len, texts)))


def _texts(item: Mapping[str, Any]) -> list[str]:
    if (item.get("type") or "message") != "message":
        return []
    if isinstance(item.get("content"), str):
        return [item["content"]]
    parts = [
        part for part in replies.listed(FORMAT, item, "content") if part.get("type") in _TEXT_IN
    ]
    return [replies.plain_text(part.get(_TEXT_IN[part["type"]])) for part in parts]


def _thoughts(item: Mapping[str, Any]) -> list[str]:
    if item.get("type") != "reasoning":
        return []
    parts = [*replies.listed(FORMAT, item, "summary"), *replies.listed(FORMAT, item, "content")]
    return [text for part in parts if (text := replies.plain_text(part.get("text")))]


def _parsed_call(item: Mapping[str, Any]) -> ToolCall:
    kind = item["type"]
    call_id, name = item.get("call_id"), item.get("name", _TOOLS.get(kind))
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise replies.not_a_reply(FORMAT, "a call has no call_id or no name")
    if kind != "function_call":
        return ToolCall(call_id, name, {field: item.get(field) for field in CALLS[kind]})
    return ToolCall(call_id, name, replies.arguments(item.get("arguments")))


_TOOLS: Final = {
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "computer_call": "computer",
}
"""The tools of calls that do not name theirs."""


def parse_history(given: replies.PlainHistory, by: Issuer) -> list[Message]:
    """Return the messages of a request's input items.

    Items of the model's that stand together are one message, as an answer is.

    Raises:
        FormatError: Something in them is invalid.

    """
    messages: list[Message] = []
    answer: list[tuple[replies.Entry, str]] = []
    asked = _Asked()
    if given.system is not None:
        messages.append(Message.system(given.system))
    for at, entry in enumerate(given.entries):
        path = f"{given.name}[{at}]"
        item: replies.Entry = (
            {"role": "user", "content": entry} if isinstance(entry, str) else entry
        )
        if not _is_models(item, path):
            messages += _sent_answer(answer, by, asked)
            answer = []
            messages.append(_sent_item(item, path, by, asked))
            asked.waiting.pause()
        else:
            answer.append((item, path))
    return [*messages, *_sent_answer(answer, by, asked)]


class _Asked:
    """The calls of a history so far."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.item_ids: dict[object, str] = {}
        """The ids of calls, by the ids of their items."""
        self.waiting = replies.WaitingCalls()

    def call_id(self, item: replies.Entry, path: str) -> str:
        """Return the id of the call that an output answers, and note that it has its answer.

        What came of a local shell names its call by the item's id, or by none that is known.
        """
        if item.get("call_id") is None and item["type"] == "local_shell_call_output":
            item_id = replies.text_in(FORMAT, item, "id", path)
            wanted = (self.item_ids.get(item_id, item_id), _TOOLS["local_shell_call"])
            (call,) = self.waiting.answered([wanted])
            return item_id if call is None else call.id
        call_id = replies.text_in(FORMAT, item, "call_id", path)
        self.waiting.answered([(call_id, "")])
        return call_id


def _is_models(item: replies.Entry, path: str) -> bool:
    """Say whether an item is part of an answer, or of what the provider's own tools did."""
    kind = item.get("type")
    if kind == "message" or (kind is None and ("role" in item or "id" not in item)):
        return replies.role_in(FORMAT, item, path, ROLES) == "assistant"
    if kind is not None and not isinstance(kind, str):
        raise replies.misfit(FORMAT, f"{path}.type", f"is {kind!r}", "give the type as text")
    return kind not in OUTPUTS


def _sent_item(item: replies.Entry, path: str, by: Issuer, asked: _Asked) -> Message:
    if item.get("type") in OUTPUTS:
        call_id = asked.call_id(item, path)
        shape = item["type"] if item.get("call_id") is not None else item["type"] + _BY_ID
        output: Any = None
        if shape == "computer_call_output":
            output = replies.objects_in(FORMAT, {"output": [item.get("output")]}, "output", path)
        elif item.get("output") is not None or shape != "apply_patch_call_output":
            output = replies.content_in(FORMAT, {"content": item.get("output")}, f"{path}.output")
        extra = fields_of(item, frozenset({"type", "call_id", "output"}))
        result = ToolResult(call_id, asked.names.get(call_id), output)
        stamp = sent_stamp(by, FORMAT, extra, shape=shape)
        return Message(role="tool", tool_result=result, extra=stamp)
    return replies.sent_message(FORMAT, item, path, by)


def _sent_answer(
    answer: Sequence[tuple[replies.Entry, str]], by: Issuer, asked: _Asked
) -> Iterator[Message]:
    if not answer:
        return
    calls: list[ToolCall] = []
    for item, path in answer:
        if item.get("type") in CALLS:
            calls.append(_sent_call(item, path))
            asked.item_ids[item.get("id")] = calls[-1].id
        elif (item.get("type") or "message") == "message" and "role" in item:
            replies.content_in(FORMAT, item, path)
    asked.names |= {call.id: call.name for call in calls}
    asked.waiting.ask(calls)
    items = [item for item, _ in answer]
    stamp = sent_stamp(by, FORMAT, items=tuple(_item(item, CALLS) for item in items))
    yield _answer(items, tuple(calls), stamp)


def _sent_call(item: replies.Entry, path: str) -> ToolCall:
    kind: str = item["type"]
    call_id = replies.text_in(FORMAT, item, "call_id", path)
    name = _TOOLS.get(kind) or replies.text_in(FORMAT, item, "name", path)
    if kind in _TOOLS:
        given = {field: item[field] for field in CALLS[kind] if item.get(field) is not None}
        return ToolCall(call_id, name, given)
    (field,) = CALLS[kind]
    text = replies.text_in(FORMAT, item, field, path)
    if kind == "custom_tool_call":
        return ToolCall(call_id, name, {field: text})
    return replies.written_call(call_id, name, text)
