"""generateContent, the API of Gemini.

Its rules: the instructions stand apart, user and model take turns, the user begins, a turn of
calls is answered by as many results in the same order, each under its call's name, and from
Gemini 3 on the first call of a turn carries its signature. Calls that somebody else made
have none, and say so with the value that Google gives for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from perdure.model.messages import Message, ToolCall
from perdure.providers.alternating import EMPTY, OPENING, alternating, system_texts
from perdure.providers.fitting import arguments_of, clean, function_name, json_value
from perdure.providers.issued import Issued, Issuer, Item, fields_of, raw, stamp_of, stamped
from perdure.providers.layout import Placed, laid_out
from perdure.providers.pairing import Exchange
from perdure.providers.parts import Media, Part, Text, Unknown, note, parts_of, words_of
from perdure.providers.replies import as_dict, check_role, issuer_of, not_a_reply
from perdure.providers.target import RenderedContext, Target

__all__ = ["parse", "render"]

FORMAT: Final = "gemini"
UNSIGNED: Final = "skip_thought_signature_validator"
"""The signature of a call that Gemini did not make."""
MAX_NAME: Final = 64
NATIVE: Final = frozenset({"inlineData", "fileData"})
IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/webp", "image/heic", "image/heif"})
Block = dict[str, Any]

_CAMEL: Final = {
    "function_call": "functionCall",
    "thought_signature": "thoughtSignature",
    "inline_data": "inlineData",
    "file_data": "fileData",
    "executable_code": "executableCode",
    "code_execution_result": "codeExecutionResult",
    "video_metadata": "videoMetadata",
}


def render(exchanges: Sequence[Exchange], target: Target) -> RenderedContext:
    """Return exchanges as the contents of a request, and the instructions."""
    turns = alternating(_turns(exchanges, target), {"text": OPENING})
    contents: list[Block] = [{"role": role, "parts": parts} for role, parts in turns]
    system = "\n\n".join(system_texts(one.head for one in exchanges))
    return RenderedContext(target.format, contents, clean(system) or None)


def _turns(exchanges: Sequence[Exchange], target: Target) -> Iterator[tuple[str, list[Block]]]:
    for exchange in exchanges:
        head = exchange.head
        if head.role == "user":
            parts = [_part(part, source) for part, source in parts_of(head)]
            yield "user", [part for part in parts if not _is_blank(part)] or [{"text": EMPTY}]
        elif head.role == "assistant":
            placed = _placed(head, target.own(stamp_of(head)))
            yield "model", _model([_own_part(one, head) for one in placed])
            yield "user", list(_responses(exchange, placed))


def _placed(message: Message, own: Issued | None) -> list[Placed]:
    if own is not None and own.items:
        return laid_out(message, own)
    said = Placed({}, (words_of(message),))
    return [said, *(Placed({}, call=at) for at in range(len(message.tool_calls)))]


def _model(parts: list[Block]) -> list[Block]:
    said = [part for part in parts if not _is_blank(part)]
    for at, part in enumerate(said):
        if "functionCall" in part:
            said[at] = {"thoughtSignature": UNSIGNED, **part}
            break
    return [] if all(part.get("thought") for part in said) else said


def _own_part(placed: Placed, message: Message) -> Block:
    if placed.call is not None:
        return _call(message.tool_calls[placed.call], placed.block)
    if placed.texts:
        return {**placed.block, "text": clean("".join(placed.texts))}
    if placed.reasoning is not None:
        return {**placed.block, "text": placed.reasoning}
    return placed.block


def _call(call: ToolCall, block: Block) -> Block:
    known = {"name": _name(call.name), "args": arguments_of(call)}
    return {**block, "functionCall": {**block.get("functionCall", {}), **known}}


def _name(name: str) -> str:
    fit = function_name(name, MAX_NAME, more=".:")
    return fit if fit[0].isalpha() or fit[0] == "_" else f"_{fit}"[:MAX_NAME]


def _responses(exchange: Exchange, placed: list[Placed]) -> Iterator[Block]:
    """Return the results in the order of their calls, under the calls' names and ids."""
    results = dict(zip(exchange.answered(), exchange.results, strict=True))
    for one in placed:
        if one.call is None:
            continue
        result = results[one.call].tool_result
        assert result is not None
        named = {"name": _name(exchange.head.tool_calls[one.call].name)}
        issued = one.block.get("functionCall", {}).get("id")
        named |= {} if issued is None else {"id": issued}
        response: Block = {"output": json_value(result.result)}
        if result.error is not None:
            error = {"error": clean(result.error) or "failed"}
            response = error if result.result is None else {**error, **response}
        yield {"functionResponse": {**named, "response": response}}


def _part(part: Part, source: Any) -> Block:
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {"text": clean(part.text)}
    if not isinstance(source, dict) or NATIVE.isdisjoint(source) or _is_refused(part):
        return _media(part)
    if part.media_type is None:
        return source
    name = "inlineData" if "inlineData" in source else "fileData"
    return {**source, name: {**source[name], "mimeType": part.type}}


def _is_refused(media: Media) -> bool:
    return media.kind == "image" and (media.type not in IMAGES or media.data == "")


def _media(media: Media) -> Block:
    if _is_refused(media):
        return {"text": note(media)}
    if media.data is not None:
        return {"inlineData": {"mimeType": media.type, "data": media.data}}
    if media.url is not None and media.url.startswith(("http://", "https://", "gs://")):
        return {"fileData": {"fileUri": media.url, "mimeType": media.type}}
    return {"text": note(media)}


def _is_blank(part: Block) -> bool:
    return part.get("text") == "" and set(part) == {"text"}


def parse(reply: Mapping[str, Any] | object, *, issuer: Issuer | str | None = None) -> Message:
    """Return a response, or the model's content of one, as a message.

    Raises:
        FormatError: It is neither.

    """
    whole = as_dict(reply)
    content, around = _content_in(whole)
    check_role(FORMAT, content, "model")
    parts = [_camel(part) for part in content["parts"]]
    by = issuer_of(FORMAT, issuer, whole.get("modelVersion", whole.get("model_version")))
    reply_id = whole.get("responseId", whole.get("response_id", "call"))
    calls = _parsed_calls(parts, reply_id if isinstance(reply_id, str) else "call")
    ids = iter(call.id for call in calls)
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        items=tuple(_item(part, ids) for part in parts),
        reply=fields_of(around, frozenset({"candidates", "content"})),
    )
    texts = [part["text"] for part in parts if _says(part) and not part.get("thought")]
    thoughts = [part["text"] for part in parts if _says(part) and part.get("thought")]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=calls,
        extra=stamped(stamp),
    )


def _content_in(whole: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's content, and what stands around it."""
    candidates = whole.get("candidates")
    if isinstance(candidates, list) and candidates:
        candidate = as_dict(candidates[0])
        content = as_dict(candidate.get("content") or {})
        around = {**whole, **candidate}
    else:
        content, around = whole, {}
    parts = content.get("parts")
    if parts is None and around:  # it was stopped before it said anything
        parts = []
    if not isinstance(parts, list) or not all(isinstance(one, Mapping) for one in parts):
        raise not_a_reply(FORMAT, "it has no candidates with parts")
    return {**content, "parts": parts}, around


def _camel(part: Mapping[str, Any]) -> Block:
    """Return a part under the names of the REST API: the SDK has others in Python."""
    known = {_CAMEL.get(name, name): value for name, value in part.items() if value is not None}
    plain_values: Block = msgspec.to_builtins(known, enc_hook=str)
    return plain_values


def _says(part: Block) -> bool:
    return isinstance(part.get("text"), str)


def _parsed_calls(parts: list[Block], reply_id: str) -> tuple[ToolCall, ...]:
    """Return the calls; where the model gave no id, one is made of the reply's and a number."""
    calls: list[ToolCall] = []
    for part in parts:
        call = part.get("functionCall")
        if call is None:
            continue
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise not_a_reply(FORMAT, "a function call has no name")
        call_id = call.get("id") or f"{reply_id}_{len(calls)}"
        calls.append(ToolCall(call_id, call["name"], call.get("args") or {}))
    return tuple(calls)


def _item(part: Block, ids: Iterator[str]) -> Item:
    if "functionCall" in part:
        beside = {
            name: value
            for name, value in part["functionCall"].items()
            if name not in {"name", "args"} and value is not None
        }
        return Item(raw({**part, "functionCall": beside}), call=next(ids))
    if not _says(part):
        return Item(raw(part))
    rest = raw({name: value for name, value in part.items() if name != "text"})
    if part.get("thought"):
        return Item(rest, reasoning=len(part["text"]))
    return Item(rest, texts=(len(part["text"]),))
