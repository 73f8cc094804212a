"""Responses, the newer API of OpenAI, with the conversation sent each time.

Its rules: each output has its call, a reasoning item stands before what it led to and can be read
only from its encrypted content, and items that were issued with reasoning are named by
their ids only if it is there too. Calls stand together, and their outputs behind them: else the
reasoning counts as missing (community.openai.com, 1355347). What a reasoning item says of its
status is for reading only (issue 13420 of litellm).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from perdure.model.messages import Message, ToolCall
from perdure.providers.fitting import (
    CallIds,
    arguments_of,
    clean,
    function_name,
    result_text,
    text_of,
)
from perdure.providers.issued import Issued, Issuer, Item, fields_of, raw, stamp_of, stamped
from perdure.providers.layout import Placed, laid_out
from perdure.providers.pairing import Exchange
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
from perdure.providers.replies import (
    arguments,
    as_dict,
    check_role,
    issuer_of,
    listed,
    not_a_reply,
    plain_text,
)
from perdure.providers.target import RenderedContext, Target

__all__ = ["parse", "render"]

FORMAT: Final = "openai-responses"
CALL_ID: Final = r"[\x21-\x7e]{1,64}"
NATIVE: Final = frozenset({"input_image", "input_file"})
CALLS: Final = frozenset({"function_call", "custom_tool_call"})
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
"""What a response repeats of its request: the prompt and all tools, each time."""
Block = dict[str, Any]


def render(exchanges: Sequence[Exchange], target: Target) -> RenderedContext:
    """Return exchanges as the input items of a request."""
    ids = CallIds(CALL_ID, unique=True)
    items: list[Block] = []
    for exchange in exchanges:
        head = exchange.head
        if head.role != "assistant":
            items.append({"role": head.role, "content": content_of(head, _part)})
            continue
        call_ids = ids.of(head.tool_calls)
        said = _assistant(head, call_ids, target.own(stamp_of(head)))
        items += said
        custom = {one["call_id"] for one in said if one.get("type") == "custom_tool_call"}
        items += _outputs(exchange, call_ids, custom)
    return RenderedContext(target.format, items)


def _assistant(message: Message, call_ids: Sequence[str], own: Issued | None) -> list[Block]:
    if own is not None and own.items:
        placed = laid_out(message, own)
        is_whole = sum(bool(one.block) for one in placed) == len(own.items)
        return _sound([_own_item(one, message, call_ids) for one in placed], is_whole=is_whole)
    text = clean(words_of(message))
    said = [{"role": "assistant", "content": text}] if text else []
    calls = zip(message.tool_calls, call_ids, strict=True)
    return [*said, *(_call(call, call_id, {}) for call, call_id in calls)]


def _own_item(placed: Placed, message: Message, call_ids: Sequence[str]) -> Block:
    block = placed.block
    if placed.call is not None:
        return _call(message.tool_calls[placed.call], call_ids[placed.call], block)
    if not placed.texts:
        return _without_status(block) if _kind(block) == "reasoning" else block
    if not block:
        return {"role": "assistant", "content": clean("".join(placed.texts))}
    texts = iter(placed.texts)
    content = [
        {**part, "text": clean(next(texts))} if part.get("type") == "output_text" else part
        for part in block["content"]
    ]
    return {**block, "content": content}


def _sound(items: list[Block], *, is_whole: bool) -> list[Block]:
    """Leave out what cannot be sent back, and the ids that went with it.

    That is reasoning that cannot be read, or led to nothing, or to a call that is gone; and calls
    that nobody here can answer, since they are no functions: of a computer, of a shell.
    """
    outputs = {item.get("call_id") for item in items if _kind(item).endswith("_output")}
    kept: list[Block] = []
    for item in reversed(items):
        if _kind(item) == "reasoning":
            fits = is_whole and bool(kept) and bool(item.get("encrypted_content"))
        else:
            fits = _kind(item) in CALLS or item.get("call_id") in {None, *outputs}
        if fits:
            kept.append(item)
    kept.reverse()
    if len(kept) == len(items):
        return kept
    return [bare for item in kept if (bare := _without_id(item)) is not None]


def _kind(item: Block) -> str:
    return str(item.get("type", "message"))


def _without_status(item: Block) -> Block:
    return {name: value for name, value in item.items() if name != "status" and value is not None}


def _without_id(item: Block) -> Block | None:
    """Return an item that stands without the reasoning it came with; None if none can."""
    if _kind(item) in CALLS:
        return {name: value for name, value in item.items() if name != "id"}
    if _kind(item) != "message":
        return None if "id" in item else item
    text = item.get("content")  # a message with its type has to have an id
    if isinstance(text, list):
        text = "".join(plain(read_part(part)) for part in text)
    return {"role": "assistant", "content": text} if text else None


def _call(call: ToolCall, call_id: str, block: Block) -> Block:
    given = arguments_of(call)
    if block.get("type") == "custom_tool_call":
        name, given = call.name, given.get("input", given)
        return {**block, "call_id": call_id, "name": name, "input": text_of(given)}
    name = function_name(call.name)
    known = {"call_id": call_id, "name": name, "arguments": text_of(given)}
    return {**block, "type": "function_call", **known}


def _outputs(exchange: Exchange, call_ids: Sequence[str], custom: set[str]) -> Iterator[Block]:
    for at, message in zip(exchange.answered(), exchange.results, strict=True):
        result = message.tool_result
        assert result is not None
        parts = shown(result.result) if result.error is None else None
        output = [_part(part, None) for part, _ in parts or ()] or result_text(result)
        kind = "custom_tool_call_output" if call_ids[at] in custom else "function_call_output"
        yield {"type": kind, "call_id": call_ids[at], "output": output}


def _part(part: Part, source: Any) -> Block:
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {"type": "input_text", "text": clean(part.text)}
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
    whole = as_dict(reply)
    check_role(FORMAT, whole, "assistant")
    if not isinstance(whole.get("output"), list):
        raise not_a_reply(FORMAT, "its output is no list of items")
    output = listed(FORMAT, whole, "output")
    for item in output:
        check_role(FORMAT, item, "assistant")
    by = issuer_of(FORMAT, issuer, whole.get("model"))
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        items=tuple(map(_item, output)),
        reply=fields_of(whole, ECHO | {"model", "object"}),
    )
    texts = [text for item in output for text in _texts(item)]
    thoughts = [text for item in output for text in _thoughts(item)]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="\n\n".join(thoughts) or None,
        tool_calls=tuple(_parsed_call(item) for item in output if item.get("type") in CALLS),
        extra=stamped(stamp),
    )


def _item(item: Mapping[str, Any]) -> Item:
    kind = item.get("type")
    if kind in CALLS:
        cut = {"call_id", "name", "arguments", "input"}
        block = {
            name: value for name, value in item.items() if name not in cut and value is not None
        }
        return Item(raw(block), call=plain_text(item.get("call_id")))
    texts = _texts(item)
    if not texts:
        return Item(raw(item))
    content = [
        {**part, "text": ""} if part.get("type") == "output_text" else part
        for part in item["content"]
    ]
    return Item(raw({**item, "content": content}), texts=tuple(map(len, texts)))


def _texts(item: Mapping[str, Any]) -> list[str]:
    if item.get("type") != "message":
        return []
    parts = listed(FORMAT, item, "content")
    return [plain_text(part.get("text")) for part in parts if part.get("type") == "output_text"]


def _thoughts(item: Mapping[str, Any]) -> list[str]:
    if item.get("type") != "reasoning":
        return []
    parts = [*listed(FORMAT, item, "summary"), *listed(FORMAT, item, "content")]
    return [text for part in parts if (text := plain_text(part.get("text")))]


def _parsed_call(item: Mapping[str, Any]) -> ToolCall:
    call_id, name = item.get("call_id"), item.get("name")
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise not_a_reply(FORMAT, "a call has no call_id or no name")
    if item.get("type") == "custom_tool_call":
        return ToolCall(call_id, name, {"input": item.get("input")})
    return ToolCall(call_id, name, arguments(item.get("arguments")))
