"""Calls of Anthropic's own tools, and their results: the model's turn holds both.

The API pairs them itself, across messages. A search next to calls of the user's tools is run when
those are answered, one that was paused when the answer is sent again; its result is at the
head of the next answer. Until then the call is open, and has to be sent. Once the user says
something it will never have a result, and a request with it is refused; so is one with a
result whose call is gone.

See "Server tools" in the documents of the Claude API (platform.claude.com), the issues 961 and
1339 of anthropic-sdk-python, and 1090 of anthropic-sdk-typescript.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from perdure.providers import context_fit, replies
from perdure.providers.context_fit import CallIds, ContextTarget, RenderedContext
from perdure.providers.issued import (
    Issued,
    IssuedPart,
    Issuer,
    PlacedPart,
    fields_of,
    laid_out,
    opaque,
    pieces,
    raw,
    sent_stamp,
    stamped,
)
from perdure.providers.parts import (
    Media,
    Part,
    Text,
    Unknown,
    note,
    parts_of,
    shown,
    words_of,
)
from perdure.providers.request_rules import ANTHROPIC_CALL_ID, IMAGES
from perdure.providers.tool_pairs import ReadExchange, ReadResult
from perdure.records.messages import Extra, Message, ToolCall, ToolResult

Block = dict[str, Any]
_CALLS: Final = frozenset({"server_tool_use", "mcp_tool_use"})


def settled(turns: context_fit.Turns, stop_reason: str | None) -> context_fit.Turns:
    """Return turns without calls that will have no result, and results without a call.

    Args:
        turns: A conversation in Anthropic's blocks.
        stop_reason: Why the newest answer ended; None where that is not known.

    """
    dropped = _callers(turns)
    waiting: set[str] = set()
    for role, blocks in turns:
        if role == "user" and any(block.get("type") != "tool_result" for block in blocks):
            dropped |= waiting
            waiting.clear()
        for block in blocks if role == "assistant" else ():
            called, answered = _ids(block)
            if called:
                waiting.add(called)
            elif answered and answered not in waiting:
                dropped.add(answered)
            else:
                waiting.discard(answered)
    if waiting and stop_reason != _OPEN_AFTER.get(turns[-1][0]):
        dropped |= waiting
    return [(role, list(_without(blocks, dropped))) for role, blocks in turns] if dropped else turns


_OPEN_AFTER: Final = {"assistant": "pause_turn", "user": "tool_use"}
"""Stop reason of an answer that continues, by the role of the last turn."""


def _callers(turns: context_fit.Turns) -> set[str]:
    """Return the ids of programs that are said to have called a tool, and are not there."""
    seen: set[str] = set()
    missing: set[str] = set()
    blocks = [block for _, blocks in turns for block in blocks]
    for block in blocks if any("caller" in block for block in blocks) else ():
        seen.add(_ids(block)[0])
        caller = block.get("caller")
        if isinstance(caller, dict) and caller.get("tool_id") is not None:
            missing |= {str(caller["tool_id"])} - seen
    return missing


def _without(blocks: Sequence[Block], dropped: set[str]) -> Iterator[Block]:
    for block in blocks:
        caller = block.get("caller")
        if not dropped.isdisjoint(_ids(block)):
            continue
        if isinstance(caller, dict) and str(caller.get("tool_id")) in dropped:
            yield {name: value for name, value in block.items() if name != "caller"}
        else:
            yield block


def _ids(block: Block) -> tuple[str, str]:
    """Return which call of the provider's own tools a block is, and which one it answers."""
    kind = str(block.get("type"))
    called = str(block.get("id")) if kind in _CALLS else ""
    return called, str(block.get("tool_use_id", ""))


# Messages, the API of Anthropic
#
# Its rules: the instructions stand apart, user and assistant take turns, results come first in the
# turn after their calls, no text is blank, ids are unique and of few characters, thinking is sent
# back with its signature and unchanged, or not at all, and never ends a turn. What its own tools
# do is in the answer; `perdure.providers.anthropic` has the rules for that.


FORMAT: Final = "anthropic"
MAX_NAME: Final = 128
THINKING: Final = frozenset({"thinking", "redacted_thinking"})


def render(said: Sequence[ReadExchange], target: ContextTarget) -> RenderedContext:
    """Return a conversation as the messages of a request, and the instructions."""
    given = [turn for turn in _turns(said) if turn[1]]
    turns_said = settled(given, _stop_reason(said))
    turns = context_fit.alternating(
        ((role, _ended(role, said_blocks)) for role, said_blocks in turns_said),
        _text_block(context_fit.OPENING),
    )
    if turns and turns[-1][0] == "assistant" and turns[-1][1][-1].get("type") == "text":
        last = turns[-1][1][-1]  # of an answer that is to be gone on with
        turns[-1][1][-1] = {**last, "text": last["text"].rstrip()}
    messages = [_message(role, blocks) for role, blocks in turns]
    return RenderedContext(target.format, messages, _system(said))


def _message(role: str, blocks: list[Block]) -> Block:
    """Return a turn as a message; text alone stays text."""
    if isinstance(blocks, context_fit.MessageBlocks):
        content = blocks[0]["text"] if blocks.text and len(blocks) == 1 else list(blocks)
        return {**blocks.fields, "role": role, "content": content}
    is_text = len(blocks) == 1 and set(blocks[0]) == {"type", "text"}
    return {"role": role, "content": blocks[0]["text"] if is_text else blocks}


def _turns(said: Sequence[ReadExchange]) -> Iterator[tuple[str, list[Block]]]:
    ids = CallIds(ANTHROPIC_CALL_ID, unique=True)
    for head, own, results in said:
        if head.role == "user":
            yield (
                "user",
                context_fit.as_sent(
                    head, own, _user(head, own) or [_text_block(context_fit.EMPTY)]
                ),
            )
        elif head.role == "assistant":
            call_ids = ids.of(head.tool_calls)
            yield "assistant", context_fit.as_sent(head, own, _assistant(head, call_ids, own))
            for answer in results:
                block = _result(answer, call_ids[answer.at])
                yield "user", context_fit.as_sent(answer.message, answer.own, [block])
        elif _stands_among(head, own):
            yield "system", context_fit.as_sent(head, own, _user(head, own))


def _stands_among(message: Message, own: Issued | None) -> bool:
    """Say whether instructions stood among the messages of a history."""
    return message.role == "system" and own is not None and own.role == "system"


def _system(said: Sequence[ReadExchange]) -> str | list[Block] | None:
    """Return all instructions: as text, or as blocks where they are given as parts."""
    apart = [
        (head, own)
        for head, own, _ in said
        if head.role == "system" and not _stands_among(head, own)
    ]
    heads = [head for head, _ in apart]
    if len(apart) == 1 and isinstance(heads[0].content, list):
        own = apart[0][1]
        if own is not None and own.sent:
            return _user(heads[0], own)
    blocks = [block for head in heads for block in _user(head) if block.get("type") == "text"]
    if all(set(block) == {"type", "text"} for block in blocks):
        return "\n\n".join(block["text"] for block in blocks) or None
    return blocks


def _user(message: Message, own: Issued | None = None) -> list[Block]:
    if own is not None and own.sent and isinstance(message.content, list):
        return [block for block in message.content if not _is_blank(block)]
    blocks = (part_block(part, source) for part, source in parts_of(message))
    return [block for block in blocks if not _is_blank(block)]


def _assistant(message: Message, call_ids: Sequence[str], own: Issued | None) -> list[Block]:
    if own is None or not own.items:
        blocks = [_text_block(words_of(message))]
        calls = [
            _call(call, call_id, {})
            for call, call_id in zip(message.tool_calls, call_ids, strict=True)
        ]
        return [block for block in (*blocks, *calls) if not _is_blank(block)]
    placed = (_own_block(part, message, call_ids) for part in laid_out(message, own))
    return [block for block in placed if block is not None]


def _own_block(placed: PlacedPart, message: Message, call_ids: Sequence[str]) -> Block | None:
    block = placed.block
    if placed.texts:
        block = {**block, "type": "text", "text": context_fit.clean("".join(placed.texts))}
        return None if _is_blank(block) else block
    if placed.reasoning is not None:
        # Without a signature it is the beginning of a thought that was cut off.
        is_signed = bool(str(block.get("signature") or "").strip())
        return {**block, "thinking": placed.reasoning} if is_signed else None
    if placed.call is not None:
        return _call(message.tool_calls[placed.call], call_ids[placed.call], block)
    return block


def _ended(role: str, blocks: list[Block]) -> list[Block]:
    """Leave out thinking that led to nothing."""
    end = len(blocks)
    while role == "assistant" and end and blocks[end - 1].get("type") in THINKING:
        end -= 1
    return blocks if end == len(blocks) else blocks[:end]


def _stop_reason(said: Sequence[ReadExchange]) -> str | None:
    """Return why the newest answer ended, if it came from this provider."""
    for head, own, _ in reversed(said):
        if head.role == "assistant":
            reason = None if own is None else own.reply.get("stop_reason")
            return None if reason is None else str(msgspec.json.decode(reason))
    return None


def _call(call: ToolCall, call_id: str, block: Block) -> Block:
    name = context_fit.function_name(call.name, MAX_NAME)
    return {
        **block,
        "type": "tool_use",
        "id": call_id,
        "name": name,
        "input": context_fit.arguments_of(call),
    }


def _result(answer: ReadResult, call_id: str) -> Block:
    result, own = answer.result, answer.own
    if own is not None and own.sent:
        known = {"type": "tool_result", "tool_use_id": call_id, **_sent_content(result, own)}
        return {**opaque(result.extra), **known}
    parts = shown(result.result) if result.error is None else None
    blocks = [part_block(part, source) for part, source in parts or ()]
    content = [block for block in blocks if not _is_blank(block)] or context_fit.result_text(result)
    block: Block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return block if result.error is None else {**block, "is_error": True}


def _sent_content(result: ToolResult, sent: Issued) -> Block:
    """Return the content of a result in the shape in which a history had it."""
    if sent.shape == "bare" and not result.error and result.result is None:
        return {}
    if result.error is not None and sent.items:
        blocks, lengths = msgspec.json.decode(sent.items[0].block), sent.items[0].texts
        texts = pieces(result.error, lengths) or [result.error]
        filled = zip(blocks, texts, strict=False)
        return {"content": [{**block, "text": text} for block, text in filled]}
    if isinstance(result.result, (str, list)):
        return {"content": result.result}
    return {"content": context_fit.result_text(result) if result.error is None else result.error}


def part_block(part: Part, source: Any) -> Block:
    """Return a part of a user's content, read from `source`, as a block."""
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {**_marks(source), **_text_block(part.text)}
    block = _media(part)
    native = isinstance(source, dict) and isinstance(source.get("source"), dict)
    return {**source, **block} if native and block["type"] != "text" else block


def _marks(source: Any) -> Block:
    if not isinstance(source, dict) or source.get("type") != "text":
        return {}
    return {name: source[name] for name in ("cache_control", "citations") if source.get(name)}


def _media(media: Media) -> Block:
    source: Block | None = None
    if media.url is not None and media.url.startswith("https://"):  # it fetches no others
        source = {"type": "url", "url": media.url}
    elif media.data:
        source = {"type": "base64", "media_type": media.type, "data": media.data}
    if source and media.kind == "image" and (media.url is not None or media.type in IMAGES):
        return {"type": "image", "source": source}
    if source and media.kind == "document" and media.type == "application/pdf":
        return {"type": "document", "source": source}
    return _text_block(note(media))


def _text_block(text: str) -> Block:
    return {"type": "text", "text": context_fit.clean(text)}


def _is_blank(block: Block) -> bool:
    return block.get("type") == "text" and not block["text"].strip()


def parse(reply: Mapping[str, Any] | object, *, issuer: Issuer | str | None = None) -> Message:
    """Return a response as a message.

    Raises:
        FormatError: It is none.

    """
    fields = replies.as_dict(reply)
    replies.check_role(FORMAT, fields, "assistant")
    if not isinstance(fields.get("content"), list):
        raise replies.not_a_reply(FORMAT, "its content is no list of blocks")
    blocks = replies.listed(FORMAT, fields, "content")
    items = tuple(map(_item, blocks))
    by = replies.issuer_of(FORMAT, issuer, fields.get("model"))
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        items=() if _is_plain(blocks) else items,
        reply=fields_of(fields, frozenset({"type", "role", "content", "model"})),
    )
    return _answer(blocks, stamped(stamp))


def _answer(blocks: Sequence[Mapping[str, Any]], extra: Extra) -> Message:
    texts = [block["text"] for block in blocks if block.get("type") == "text"]
    thoughts = [block["thinking"] for block in blocks if block.get("type") == "thinking"]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(
            ToolCall(block["id"], block["name"], block["input"])
            for block in blocks
            if block.get("type") == "tool_use"
        ),
        extra=extra,
    )


def _item(block: Mapping[str, Any]) -> IssuedPart:
    kind = block.get("type")
    if kind == "text":
        return IssuedPart(_rest(block, "text"), texts=(len(_field(block, "text")),))
    if kind == "thinking":
        return IssuedPart(_rest(block, "thinking"), reasoning=len(_field(block, "thinking")))
    if kind == "tool_use":
        _field(block, "name")
        if "input" not in block:
            raise replies.not_a_reply(FORMAT, "a block of type 'tool_use' has no input")
        return IssuedPart(_rest(block, "id", "name", "input"), call=_field(block, "id"))
    return IssuedPart(raw(block))


def _field(block: Mapping[str, Any], name: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise replies.not_a_reply(FORMAT, f"a block of type {block.get('type')!r} has no {name}")
    return text


def _rest(block: Mapping[str, Any], *without: str) -> Any:
    return raw(
        {name: value for name, value in block.items() if name not in without and value is not None}
    )


def _is_plain(blocks: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether text and then calls is all there is, so that the message says it itself."""
    shapes = [{name for name, value in block.items() if value is not None} for block in blocks]
    calls = shapes[1:] if shapes[:1] == [{"type", "text"}] else shapes
    if any(block.get("type") not in {"text", "tool_use"} for block in blocks):
        return False  # a call of the provider's own tool looks like one of the user's
    return all(shape == {"type", "id", "name", "input"} for shape in calls)


def parse_history(given: replies.PlainHistory, by: Issuer) -> list[Message]:
    """Return the messages of a request.

    Raises:
        FormatError: Something in them is invalid.

    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    if given.system is not None:
        content = replies.content_in(FORMAT, {"content": given.system}, "system")
        messages.append(Message(role="system", content=content, extra=sent_stamp(by, FORMAT)))
    for at, entry in enumerate(given.entries):
        path = f"{given.name}[{at}]"
        role = replies.role_in(FORMAT, entry, path, ("user", "assistant", "system"))
        content = replies.content_in(FORMAT, entry, path)
        extra = fields_of(entry, frozenset({"role", "content"}))
        if role == "assistant":
            message = _sent_answer(content, path, by, extra)
            names |= {call.id: call.name for call in message.tool_calls}
            messages.append(message)
        elif role == "system":
            stamp = sent_stamp(by, FORMAT, extra, role="system")
            messages.append(Message(role="system", content=content, extra=stamp))
        else:
            messages += _sent_user(content, path, by, extra, names)
    return messages


def _sent_user(
    content: Any, path: str, by: Issuer, extra: Extra, names: Mapping[str, str]
) -> Iterator[Message]:
    """Return the results in a user message, and the user's other content in it."""
    blocks = [] if isinstance(content, str) else content
    follows = False
    for at, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            continue
        fields = {} if follows else extra
        yield _sent_result(block, f"{path}.content[{at}]", by, names, fields, follows=follows)
        follows = True
    other_blocks = [block for block in blocks if block.get("type") != "tool_result"]
    if other_blocks or not follows:
        text = content if isinstance(content, str) else other_blocks
        stamp = sent_stamp(by, FORMAT, {} if follows else extra, follows=follows)
        yield Message(role="user", content=text, extra=stamp)


def _sent_result(
    block: replies.Entry,
    path: str,
    by: Issuer,
    names: Mapping[str, str],
    extra: Extra,
    *,
    follows: bool,
) -> Message:
    call_id = replies.text_in(FORMAT, block, "tool_use_id", path)
    content = replies.content_in(FORMAT, block, path, may_lack=True)
    result, error = content, None
    items: tuple[IssuedPart, ...] = ()
    if block.get("is_error"):
        parts = content if isinstance(content, list) else []
        texts = [part["text"] for part in parts if part.get("type") == "text" and "text" in part]
        error = "".join(map(str, texts)) if parts else content or ""
        result = content if len(texts) < len(parts) else None
        if parts and result is None:
            bare = [
                {name: text_part[name] for name in text_part if name != "text"}
                for text_part in parts
            ]
            items = (IssuedPart(raw(bare), texts=tuple(map(len, texts))),)
    beside = fields_of(block, frozenset({"type", "tool_use_id", "content"}))
    shape = "bare" if content is None else None
    stamp = sent_stamp(by, FORMAT, extra, shape=shape, follows=follows, items=items)
    answer = ToolResult(call_id, names.get(call_id), result, error, beside)
    return Message(role="tool", tool_result=answer, extra=stamp)


def _sent_answer(content: Any, path: str, by: Issuer, extra: Extra) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content, extra=sent_stamp(by, FORMAT, extra))
    for at, block in enumerate(content):
        place, kind = f"{path}.content[{at}]", block.get("type")
        for name in _NEEDED.get(str(kind), ()):
            replies.text_in(FORMAT, block, name, place)
        if kind == "tool_use" and not isinstance(block.get("input"), dict):
            raise replies.misfit(
                FORMAT, f"{place}.input", "is no object", "give the call's arguments"
            )
    stamp = sent_stamp(by, FORMAT, extra, items=tuple(map(_item, content)))
    return _answer(content, stamp)


_NEEDED: Final = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name")}
"""The fields of blocks that have to be text."""
