"""generateContent, the API of Gemini.

Its rules: the instructions stand apart, user and model take turns, the user begins, a turn of
calls is answered by as many results in the same order, each under its call's name, and from
Gemini 3 on the first call of a turn carries its signature. Calls that another model made
have none, and say so with the value that Google gives for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec

from perdure.providers import context_fit, replies
from perdure.providers.context_fit import ContextTarget, RenderedContext
from perdure.providers.issued import (
    Issued,
    IssuedPart,
    Issuer,
    PlacedPart,
    fields_of,
    laid_out,
    opaque,
    raw,
    sent_stamp,
    stamped,
)
from perdure.providers.parts import Media, Part, Text, Unknown, note, parts_of, words_of
from perdure.providers.request_rules import GEMINI_IMAGES
from perdure.providers.tool_pairs import ReadExchange, ReadResult
from perdure.records.messages import Extra, Message, ToolCall, ToolResult

FORMAT: Final = "gemini"
UNSIGNED: Final = "skip_thought_signature_validator"
"""The signature of a call that Gemini did not make."""
MAX_NAME: Final = 64
NATIVE: Final = frozenset({"inlineData", "fileData"})
_WRAPPED: Final = ("output", "result")
"""The names under which a function's result is in its response."""
Block = dict[str, Any]


def render(said: Sequence[ReadExchange], target: ContextTarget) -> RenderedContext:
    """Return a conversation as the contents of a request, and the instructions."""
    turns_said = _without_bare_thoughts([turn for turn in _turns(said) if turn[1]])
    turns = context_fit.alternating(turns_said, {"text": context_fit.OPENING})
    contents: list[Block] = [
        {
            **(parts.fields if isinstance(parts, context_fit.MessageBlocks) else {}),
            "role": role,
            "parts": list(parts),
        }
        for role, parts in turns
    ]
    return RenderedContext(target.format, contents, _system(said))


def _without_bare_thoughts(turns: context_fit.Turns) -> Iterator[tuple[str, list[Block]]]:
    """Leave out thoughts that led to nothing; a stream may have them in a content of their own."""
    if not any("thought" in part for _, said in turns for part in said):
        yield from turns
        return
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        contents = list(run)
        parts = [part for _, said in contents for part in said]
        if role != "model" or not all(part.get("thought") for part in parts):
            yield from contents


def _system(said: Sequence[ReadExchange]) -> str | list[Block] | None:
    """Return the instructions: as text, or as parts where one message of a history has several."""
    given = [(head, own) for head, own, _ in said if head.role == "system"]
    if len(given) == 1:
        (head, own) = given[0]
        if isinstance(head.content, list) and len(head.content) > 1 and own and own.sent:
            return head.content
    texts = [head.text for head, _ in given if head.text.strip()]
    return context_fit.clean("\n\n".join(texts)) or None


def _turns(said: Sequence[ReadExchange]) -> Iterator[tuple[str, list[Block]]]:
    for head, own, results in said:
        if head.role == "user":
            parts = [part_block(part, source) for part, source in parts_of(head)]
            if own is not None and own.sent and isinstance(head.content, list):
                parts = head.content
            parts_said = [part for part in parts if not _is_blank(part)] or [
                {"text": context_fit.EMPTY}
            ]
            yield _role(own, "user"), context_fit.as_sent(head, own, parts_said)
        elif head.role == "assistant":
            placed = _placed(head, own)
            parts_said = [_own_part(own_part, head) for own_part in placed]
            yield "model", context_fit.as_sent(head, own, _model(parts_said))
            if all(answer.own is not None and answer.own.sent for answer in results):
                yield from _sent_responses(head, results, placed)
            else:
                yield "user", list(_responses(head, results, placed))


def _role(own: Issued | None, usual: str) -> str:
    return usual if own is None or own.role in {None, "tool"} else own.role


def _placed(message: Message, own: Issued | None) -> list[PlacedPart]:
    if own is not None and own.items:
        return laid_out(message, own)
    placed = PlacedPart({}, (words_of(message),))
    return [placed, *(PlacedPart({}, call=at) for at in range(len(message.tool_calls)))]


def _model(parts: list[Block]) -> list[Block]:
    shown = [part for part in parts if not _is_blank(part)]
    for at, part in enumerate(shown):
        if "functionCall" in part:
            is_signed = bool(str(part.get("thoughtSignature") or "").strip())
            shown[at] = part if is_signed else {**part, "thoughtSignature": UNSIGNED}
            break
    return shown


def _own_part(placed: PlacedPart, message: Message) -> Block:
    if placed.call is not None:
        return _call(message.tool_calls[placed.call], placed.block)
    if placed.texts:
        return {**placed.block, "text": context_fit.clean("".join(placed.texts))}
    if placed.reasoning is not None:
        return {**placed.block, "text": placed.reasoning}
    return placed.block


def _call(call: ToolCall, block: Block) -> Block:
    issued = block.get("functionCall", {})
    known = {"name": _name(call.name), "args": context_fit.arguments_of(call)}
    if issued.get("args", {}) is None and not known["args"]:
        del known["args"]  # it was called without any
    fields = {**issued, **known}
    return {
        **block,
        "functionCall": {name: fields[name] for name in fields if fields[name] is not None},
    }


def _name(name: str) -> str:
    fit = context_fit.function_name(name, MAX_NAME, more=".:")
    return fit if fit[0].isalpha() or fit[0] == "_" else f"_{fit}"[:MAX_NAME]


def _responses(
    head: Message, results: Sequence[ReadResult], placed: list[PlacedPart]
) -> Iterator[Block]:
    """Return the results in the order of their calls, under the calls' names and ids."""
    by_call = {answer.at: answer.result for answer in results}
    for part in placed:
        if part.call is None:
            continue
        result = by_call[part.call]
        named = {"name": _name(head.tool_calls[part.call].name)}
        issued = part.block.get("functionCall", {}).get("id")
        named |= {} if issued is None else {"id": issued}
        value = context_fit.without_media(result.result)
        response: Block = {"output": context_fit.json_value(value)}
        if result.error is not None:
            error = {"error": context_fit.clean(result.error) or "failed"}
            response = error if result.result is None else {**error, **response}
        yield {"functionResponse": {**named, "response": response}}


def _sent_responses(
    head: Message, results: Sequence[ReadResult], placed: list[PlacedPart]
) -> Iterator[tuple[str, list[Block]]]:
    """Return the results of a history in the order and the shape that it had, under the calls'
    names and ids."""
    blocks = {part.call: part.block for part in placed}
    for at, message, result, own in results:
        assert own is not None  # all were sent
        issued = blocks[at].get("functionCall", {}).get("id")
        named = {**opaque(result.extra, without=frozenset({"id"}))}
        named |= {"name": _name(head.tool_calls[at].name)}
        named |= {} if issued is None else {"id": issued}
        if own.shape == "error" and result.error is not None:
            named["response"] = {"error": result.error}
        elif own.shape in _WRAPPED:
            named["response"] = {own.shape: context_fit.json_value(result.result)}
        elif own.shape is None or result.result is not None:
            is_object = isinstance(result.result, dict)
            named["response"] = context_fit.json_value(
                result.result if is_object else {"output": result.result}
            )
        beside = {} if not own.items else msgspec.json.decode(own.items[0].block)
        yield (
            _role(own, "user"),
            context_fit.as_sent(message, own, [{**beside, "functionResponse": named}]),
        )


def part_block(part: Part, source: Any) -> Block:
    """Return a part of a user's content, read from `source`, as a part."""
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {"text": context_fit.clean(part.text)}
    if not isinstance(source, dict) or NATIVE.isdisjoint(source) or _is_refused(part):
        return _media(part)
    if part.media_type is None:
        return source
    name = "inlineData" if "inlineData" in source else "fileData"
    return {**source, name: {**source[name], "mimeType": part.type}}


def _is_refused(media: Media) -> bool:
    return media.kind == "image" and (media.type not in GEMINI_IMAGES or media.data == "")


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
    fields = replies.as_dict(reply)
    content, around = _content_in(fields)
    replies.check_role(FORMAT, content, "model")
    parts = _rest_parts(content["parts"])
    by = replies.issuer_of(FORMAT, issuer, fields.get("modelVersion", fields.get("model_version")))
    reply_id = fields.get("responseId", fields.get("response_id", "call"))
    calls = _parsed_calls(parts, reply_id if isinstance(reply_id, str) else "call")
    ids = iter(call.id for call in calls)
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        items=tuple(_item(part, ids) for part in parts),
        reply=fields_of(around, frozenset({"candidates", "content"})),
    )
    return _answer(parts, calls, stamped(stamp))


def _answer(parts: list[Block], calls: tuple[ToolCall, ...], extra: Extra) -> Message:
    texts = [part["text"] for part in parts if _says(part) and not part.get("thought")]
    thoughts = [part["text"] for part in parts if _says(part) and part.get("thought")]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=calls,
        extra=extra,
    )


def _content_in(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's content, and what surrounds it."""
    candidates = fields.get("candidates")
    if isinstance(candidates, list) and candidates:
        candidate = replies.as_dict(candidates[0])
        content = replies.as_dict(candidate.get("content") or {})
        around = {**fields, **candidate}
    else:
        content, around = fields, {}
    parts = content.get("parts")
    if parts is None and around:  # it was stopped before it said anything
        parts = []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise replies.not_a_reply(FORMAT, "it has no candidates with parts")
    return {**content, "parts": parts}, around


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
            raise replies.not_a_reply(FORMAT, "a function call has no name")
        call_id = call.get("id") or f"{reply_id}_{len(calls)}"
        calls.append(ToolCall(call_id, call["name"], call.get("args") or {}))
    return tuple(calls)


def _item(part: Block, ids: Iterator[str]) -> IssuedPart:
    if "functionCall" in part:
        beside = {
            name: value
            for name, value in part["functionCall"].items()
            if name not in {"name", "args"} and value is not None
        }
        if part["functionCall"].get("args") is None:
            beside["args"] = None
        return IssuedPart(raw({**part, "functionCall": beside}), call=next(ids))
    if not _says(part):
        return IssuedPart(raw(part))
    other_fields = raw({name: value for name, value in part.items() if name != "text"})
    if part.get("thought"):
        return IssuedPart(other_fields, reasoning=len(part["text"]))
    return IssuedPart(other_fields, texts=(len(part["text"]),))


def _rest_parts(given: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return parts under the names of the REST API: the SDK has others in Python."""
    parts: list[Block] = _rest_names(msgspec.to_builtins(given, enc_hook=str))
    return [{name: value for name, value in part.items() if value is not None} for part in parts]


_FREE: Final = frozenset({"args", "response", "partMetadata"})
"""Fields that hold what users name, and not the API."""


def _rest_names(value: Any) -> Any:
    """Return a value under the names of the REST API, however deep they stand."""
    if isinstance(value, list):
        return [_rest_names(member) for member in value]
    if not isinstance(value, dict):
        return value
    named = {_HUMP.sub(lambda at: at[1].upper(), name): member for name, member in value.items()}
    return {
        name: member if name in _FREE else _rest_names(member) for name, member in named.items()
    }


_HUMP: Final = re.compile("(?<=[a-z0-9])_([a-z0-9])")


def parse_history(given: replies.PlainHistory, by: Issuer) -> list[Message]:
    """Return the messages of a request's contents.

    Raises:
        FormatError: Something in them is invalid.

    """
    messages: list[Message] = []
    waiting = replies.WaitingCalls()
    if given.system is not None:
        messages.append(_sent_system(given.system, by))
    for at, entry in enumerate(given.entries):
        path = f"{given.name}[{at}]"
        content: replies.Entry = {"parts": [{"text": entry}]} if isinstance(entry, str) else entry
        role = replies.role_in(FORMAT, {"role": content.get("role") or "user"}, path, ROLES)
        parts = _sent_parts(content, path)
        extra = fields_of(content, frozenset({"role", "parts"}))
        if role == "model":
            calls = _sent_calls(parts, path, at)
            ids = iter(call.id for call in calls)
            items = tuple(_item(part, ids) for part in parts)
            messages.append(_answer(parts, calls, sent_stamp(by, FORMAT, extra, items=items)))
            waiting.ask(calls)
        else:
            own = None if role == "user" else role
            messages += _sent_user(parts, path, by, (extra, own), waiting)
            waiting.pause()
    return messages


ROLES: Final = ("user", "model", "function", "tool")


def _sent_system(system: Any, by: Issuer) -> Message:
    if isinstance(system, str):
        return Message.system(system)
    content = {"parts": system} if isinstance(system, list) else system
    parts = _sent_parts(content if "parts" in content else {"parts": [content]}, "system")
    return Message(role="system", content=parts, extra=sent_stamp(by, FORMAT))


def _sent_parts(content: replies.Entry, path: str) -> list[Block]:
    if "parts" not in content:
        raise replies.misfit(
            FORMAT, f"{path}.parts", "is missing", "give {'role': 'user', 'parts': [{'text': …}]}"
        )
    given = content["parts"]
    if isinstance(given, list):
        given = [{"text": part} if isinstance(part, str) else part for part in given]
    return _rest_parts(replies.objects_in(FORMAT, {"parts": given}, "parts", path))


def _sent_calls(parts: list[Block], path: str, index: int) -> tuple[ToolCall, ...]:
    for at, part in enumerate(parts):
        call = part.get("functionCall")
        if call is not None:
            replies.text_in(
                FORMAT,
                call if isinstance(call, dict) else {},
                "name",
                f"{path}.parts[{at}].functionCall",
            )
    return _parsed_calls(parts, f"history_{index}")


def _sent_user(
    parts: list[Block],
    path: str,
    by: Issuer,
    own: tuple[Extra, str | None],
    waiting: replies.WaitingCalls,
) -> Iterator[Message]:
    """Return the results in a user content, and the user's other parts in it."""
    extra, role = own
    follows = False
    given: dict[int, Block] = {}
    for at, part in enumerate(parts):
        if "functionCall" in part:
            place = f"{path}.parts[{at}].functionCall"
            raise replies.misfit(
                FORMAT, place, "is the user's", "give the content the role 'model'"
            )
        if "functionResponse" in part:
            response = part["functionResponse"]
            given[at] = response if isinstance(response, dict) else {}
            replies.text_in(FORMAT, given[at], "name", f"{path}.parts[{at}].functionResponse")
    calls = waiting.answered([(one.get("id"), one["name"]) for one in given.values()])
    for (at, response), call in zip(given.items(), calls, strict=True):
        place = f"{path}.parts[{at}].functionResponse"
        call_id = response.get("id") or place if call is None else call.id
        result, shape = _sent_result(response, place, call_id)
        beside = {name: value for name, value in parts[at].items() if name != "functionResponse"}
        items = (IssuedPart(raw(beside)),) if beside else ()
        how = {"role": role, "shape": shape, "follows": follows, "items": items}
        stamp = sent_stamp(by, FORMAT, {} if follows else extra, **how)
        yield Message(role="tool", tool_result=result, extra=stamp)
        follows = True
    other_parts = [part for part in parts if "functionResponse" not in part]
    if other_parts or not follows:
        stamp = sent_stamp(by, FORMAT, {} if follows else extra, role=role, follows=follows)
        yield Message(role="user", content=other_parts, extra=stamp)


def _sent_result(given: Block, path: str, call_id: str) -> tuple[ToolResult, str | None]:
    """Return what a function gave, and in which shape its response said so."""
    name: str = given["name"]
    extra = fields_of(given, frozenset({"name", "response"}))
    response = given.get("response")
    if response is None:
        return ToolResult(call_id, name, None, None, extra), "bare"
    if not isinstance(response, dict):
        raise replies.misfit(FORMAT, f"{path}.response", "is no object", "give {'output': …}")
    (key, value), *more = response.items() if response else [("", None)]
    if key == "error" and isinstance(value, str) and not more:
        return ToolResult(call_id, name, None, value, extra), "error"
    if key in _WRAPPED and not more:
        return ToolResult(call_id, name, value, None, extra), key
    return ToolResult(call_id, name, response, None, extra), None
