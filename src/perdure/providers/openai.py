"""Chat Completions, as spoken by OpenAI, DeepSeek, OpenRouter, vLLM and many more.

Its rules: tool messages come right after the message with their calls, an assistant message
says something or calls something, arguments are JSON, media is the user's. Reasoning goes
back to its issuer with the message that it came with (DeepSeek refuses a message with calls
that lacks it), under the name that the issuer gave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from perdure.providers import context_fit, parts, replies
from perdure.providers.context_fit import CallIds, ContextTarget, RenderedContext
from perdure.providers.issued import (
    Issued,
    Issuer,
    fields_of,
    opaque,
    raw,
    sent_stamp,
    stamped,
)
from perdure.providers.parts import Media, Part, Text, Unknown
from perdure.providers.request_rules import CHAT_CALL_ID
from perdure.providers.tool_pairs import ReadExchange, ReadResult
from perdure.records.messages import CALL_FIELDS, Extra, Message, ToolCall, ToolResult

FORMAT: Final = "openai"
REASONING: Final = ("reasoning_content", "reasoning")
"""The names that providers give it."""
SAID_APART: Final = frozenset({"role", "content", "tool_calls"})
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
NOT_SENT_BACK: Final = frozenset({"audio", "annotations"})
"""Fields that a reply may have and a request may not."""
NATIVE: Final = frozenset({"image_url", "input_audio", "file"})
SOUNDS: Final = {"audio/wav": "wav", "audio/mpeg": "mp3"}


def render(said: Sequence[ReadExchange], target: ContextTarget) -> RenderedContext:
    """Return a conversation as the messages of a request."""
    ids = CallIds(CHAT_CALL_ID)
    # The name of the field that the reader's own messages with calls have to have.
    fields_used = (own.reasoning_field for _, own, _ in reversed(said) if own is not None)
    field = next(filter(None, fields_used), None)
    messages: list[dict[str, Any]] = []
    for head, own, results in said:
        if head.role != "assistant" and own is not None and own.sent:
            fields = {"role": own.role or head.role, "content": head.content}
            messages.append({**opaque(head.extra), **fields})
            continue
        if head.role != "assistant":
            content = parts.content_of(head, partial(_part, target=target))
            messages.append({"role": head.role, "content": content})
            continue
        call_ids = ids.of(head.tool_calls)
        rendered = _assistant(head, call_ids, own, field)
        if rendered is not None:
            messages.append(rendered)
        if results:
            rendered_results = _results(head, own, results, call_ids)
            messages += sorted(rendered_results, key=lambda one: one["role"] == "function")
    return RenderedContext(target.format, messages)


def _results(
    head: Message,
    head_own: Issued | None,
    results: Sequence[ReadResult],
    call_ids: Sequence[str],
) -> Iterator[dict[str, Any]]:
    functions = {  # as calls were before they had ids
        at
        for at, call in enumerate(head.tool_calls)
        if head_own is not None and call.extra.get("type") == raw("function_call")
    }
    for at, message, result, own in results:
        content: Any = context_fit.result_text(result)
        fields: dict[str, Any] = {}
        if own is not None and own.sent:
            fields = {**opaque(message.extra), **opaque(result.extra)}
            is_own = result.error is None and isinstance(result.result, (str, list, type(None)))
            content = result.result if is_own else content
        if at in functions:
            name = context_fit.function_name(head.tool_calls[at].name)
            content = content if isinstance(content, str) else context_fit.result_text(result)
            yield {**fields, "role": "function", "name": name, "content": content}
        else:
            yield {**fields, "role": "tool", "tool_call_id": call_ids[at], "content": content}


def _assistant(
    message: Message, call_ids: Sequence[str], own: Issued | None, field: str | None
) -> dict[str, Any] | None:
    if own is not None and own.sent:
        return _sent(message, call_ids, own)
    content = message.content
    if own is None or not isinstance(content, list):
        content = context_fit.clean(parts.words_of(message)) or None
    if not content and not message.tool_calls:
        return None
    rendered: dict[str, Any] = {"role": "assistant", "content": content}
    if own is not None:
        rendered |= opaque(message.extra, without=NOT_SENT_BACK)
    if own is not None and own.reasoning_field is not None:
        rendered[own.reasoning_field] = message.reasoning or ""
    elif field is not None and message.tool_calls:
        rendered[field] = ""
    if message.tool_calls:
        rendered["tool_calls"] = [
            _call(call, call_id, own)
            for call, call_id in zip(message.tool_calls, call_ids, strict=True)
        ]
    return rendered


def _sent(message: Message, call_ids: Sequence[str], own: Issued) -> dict[str, Any] | None:
    """Return an answer of a history in the shape in which it came."""
    sent: dict[str, Any] = opaque(message.extra)
    content = message.content
    if own.shape in {"refusal", "refusal-blank"}:
        sent["refusal"], content = parts.words_of(message), None if own.shape == "refusal" else ""
    elif own.shape == "audio":
        content = None
    if isinstance(sent.get("audio"), dict):
        sent["audio"] = {"id": sent["audio"].get("id")}
    if own.reasoning_field is not None:
        sent[own.reasoning_field] = message.reasoning
    calls = [
        _call(call, call_id, own)
        for call, call_id in zip(message.tool_calls, call_ids, strict=True)
    ]
    for call in calls:
        if call["type"] == "function_call":
            sent["function_call"] = call["function"]
    listed_calls = [call for call in calls if call["type"] != "function_call"]
    if listed_calls:
        sent["tool_calls"] = listed_calls
    if not sent and not content and content != "":
        return None
    return {**sent, "role": "assistant", "content": content}


def _call(call: ToolCall, call_id: str, own: Issued | None) -> dict[str, Any]:
    extra = {} if own is None else opaque(call.extra)
    given = context_fit.arguments_of(call)
    if extra.get("type") == "custom":
        name = context_fit.function_name(call.name)
        custom = {"name": name, "input": context_fit.text_of(given.get("input", given))}
        return {**extra, "id": call_id, "custom": {**extra.get("custom", {}), **custom}}
    function = {**extra.pop("function", {}), "name": context_fit.function_name(call.name)}
    function["arguments"] = (
        context_fit.text_of(given) if own is None else context_fit.sent_arguments(call)
    )
    return {"type": "function", **extra, "id": call_id, "function": function}


def part_block(part: Part, source: Any) -> dict[str, Any]:
    """Return a part of a user's content, read from `source`, as OpenAI takes it."""
    return _part(part, source, ContextTarget(FORMAT, Issuer(FORMAT)))


def _part(part: Part, source: Any, target: ContextTarget) -> dict[str, Any]:
    if isinstance(part, Unknown):
        return part.part
    if isinstance(part, Text):
        return {**_marks(source, target), "type": "text", "text": context_fit.clean(part.text)}
    block = _media(part)
    if isinstance(source, dict) and source.get("type") in NATIVE:
        # Others who speak the format may take more than OpenAI does.
        takes = block["type"] != "text" or part.kind != "image"
        return source if takes or target.issuer.provider != FORMAT else block
    return block


def _marks(source: Any, target: ContextTarget) -> dict[str, Any]:
    """Return the fields of a text part besides its text; OpenAI refuses those of others."""
    if not isinstance(source, dict) or source.get("type") != "text":
        return {}
    kept_fields = {"prompt_cache_breakpoint"}
    if target.issuer.provider != FORMAT:
        kept_fields.add("cache_control")
    return {name: value for name, value in source.items() if name in kept_fields}


def _media(media: Media) -> dict[str, Any]:
    url = parts.image_url(media)
    if url is not None:
        return {"type": "image_url", "image_url": {"url": url}}
    if media.data and media.kind == "document":
        file = {"filename": media.name or "document", "file_data": media.data_url}
        return {"type": "file", "file": file}
    if media.data and media.type in SOUNDS:
        audio = {"data": media.data, "format": SOUNDS[media.type]}
        return {"type": "input_audio", "input_audio": audio}
    return {"type": "text", "text": parts.note(media)}


def parse(reply: Mapping[str, Any] | object, *, issuer: Issuer | str | None = None) -> Message:
    """Return a completion, or the assistant's message of one, as a message.

    Raises:
        FormatError: It is neither.

    """
    fields = replies.as_dict(reply)
    message, around = _message_in(fields)
    replies.check_role(FORMAT, message, "assistant")
    by = replies.issuer_of(FORMAT, issuer, fields.get("model"))
    field = next((name for name in REASONING if isinstance(message.get(name), str)), None)
    stamp = Issued(
        by.provider,
        FORMAT,
        by.model,
        reasoning_field=field,
        reply=fields_of(around, frozenset({"choices"})),
    )
    return Message(
        role="assistant",
        content=_heard(message),
        reasoning=None if field is None else message[field],
        tool_calls=tuple(map(_parsed_call, replies.listed(FORMAT, message, "tool_calls"))),
        extra=stamped(stamp, fields_of(message, _read(message, field))),
    )


def _read(message: Mapping[str, Any], field: str | None) -> frozenset[str]:
    """Return the fields of an answer that the message says itself."""
    refused = () if message.get("content") else ("refusal",)
    return SAID_APART.union(refused, () if field is None else (field,))


def _message_in(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the assistant's message, and what surrounds it."""
    choices = fields.get("choices")
    if isinstance(choices, list) and choices:
        choice = replies.as_dict(choices[0])
        message = choice.pop("message", None)
        if isinstance(message, Mapping):
            return dict(message), {**fields, **choice}
    if "content" in fields or "tool_calls" in fields:
        return fields, {}
    raise replies.not_a_reply(FORMAT, "it has no choices with a message")


def _heard(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise replies.not_a_reply(FORMAT, "its content is neither text nor a list of parts")
    if content:
        return content
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return [{"type": "refusal", "refusal": refusal}]
    audio = message.get("audio")
    return replies.plain_text(audio.get("transcript")) if isinstance(audio, Mapping) else content


def _parsed_call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("id"), str):
        raise replies.not_a_reply(FORMAT, "a tool call has no id")
    extra: Extra = fields_of(call, frozenset({"id", "type", "index", "function", "custom"}))
    custom = call.get("custom")
    if isinstance(custom, Mapping):
        extra["type"] = raw("custom")
        return ToolCall(
            call["id"],
            replies.plain_text(custom.get("name")),
            {"input": custom.get("input")},
            extra,
        )
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise replies.not_a_reply(FORMAT, f"the tool call {call['id']!r} names no function")
    _keep_beside(extra, "function", function, "arguments")
    return ToolCall(
        call["id"],
        replies.plain_text(function.get("name")),
        replies.arguments(function.get("arguments")),
        extra,
    )


def _keep_beside(extra: Extra, name: str, owner: Mapping[str, Any], name_known: str) -> None:
    beside = fields_of(owner, frozenset({"name", name_known}))
    if beside:
        extra[name] = raw(beside)


def parse_history(given: replies.PlainHistory, by: Issuer) -> list[Message]:
    """Return the messages of a request.

    Raises:
        FormatError: Something in them is invalid.

    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    functions = replies.WaitingCalls()
    for at, entry in enumerate(given.entries):
        path = f"{given.name}[{at}]"
        role = replies.role_in(FORMAT, entry, path, ROLES)
        if role == "assistant":
            message = _sent_answer(entry, path, by, f"function_call_{at}")
            names |= {call.id: call.name for call in message.tool_calls}
            if isinstance(entry.get("function_call"), dict):
                functions.ask(message.tool_calls[-1:])
            messages.append(message)
        elif role == "tool":
            messages.append(_sent_result(entry, path, by, names))
        elif role == "function":
            name = replies.text_in(FORMAT, entry, "name", path)
            content = replies.content_in(FORMAT, entry, path, may_lack=True)
            (call,) = functions.answered([(None, name)])
            call_id = f"function_call_{at}" if call is None else call.id
            result = ToolResult(call_id, name, content)
            extra = fields_of(entry, frozenset({"role", "name", "content"}))
            stamp = sent_stamp(by, FORMAT, extra, role="function")
            messages.append(Message(role="tool", tool_result=result, extra=stamp))
            functions.pause()
        else:
            functions.pause()
            messages.append(replies.sent_message(FORMAT, entry, path, by))
    return messages


def _sent_result(entry: replies.Entry, path: str, by: Issuer, names: Mapping[str, str]) -> Message:
    call_id = replies.text_in(FORMAT, entry, "tool_call_id", path)
    content = replies.content_in(FORMAT, entry, path)
    extra = fields_of(entry, frozenset({"role", "tool_call_id", "content"}))
    result = ToolResult(call_id, names.get(call_id), content)
    return Message(role="tool", tool_result=result, extra=sent_stamp(by, FORMAT, extra))


def _sent_answer(entry: replies.Entry, path: str, by: Issuer, made_id: str) -> Message:
    content = replies.content_in(FORMAT, entry, path, may_lack=True)
    field = next((name for name in REASONING if isinstance(entry.get(name), str)), None)
    shape, heard = None, _heard(entry)
    if not content and heard:
        shape = "refusal" if isinstance(heard, list) else "audio"
        shape = f"{shape}-blank" if content == "" and shape == "refusal" else shape
        content = heard
    calls = [
        _sent_call(call, f"{path}.tool_calls[{number}]")
        for number, call in enumerate(replies.objects_in(FORMAT, entry, "tool_calls", path))
    ]
    function = entry.get("function_call")
    if function is not None:
        calls.append(_sent_function(function, f"{path}.function_call", made_id))
    extra = fields_of(entry, _read(entry, field) | {"function_call"})
    return Message(
        role="assistant",
        content=content,
        reasoning=None if field is None else entry[field],
        tool_calls=tuple(calls),
        extra=sent_stamp(by, FORMAT, extra, shape=shape, reasoning_field=field),
    )


def _sent_call(call: replies.Entry, path: str) -> ToolCall:
    call_id = replies.text_in(FORMAT, call, "id", path)
    kind = "custom" if call.get("type") == "custom" else "function"
    field = "input" if kind == "custom" else "arguments"
    function = call.get(kind)
    if not isinstance(function, dict):
        raise replies.misfit(
            FORMAT, f"{path}.{kind}", "is missing", "give the name and what it is given"
        )
    name = replies.text_in(FORMAT, function, "name", f"{path}.{kind}")
    text = replies.text_in(FORMAT, function, field, f"{path}.{kind}")
    extra: Extra = fields_of(call, frozenset({"id", "type", "function", "custom"}))
    _keep_beside(extra, kind, function, field)
    for beside in extra:
        if beside in CALL_FIELDS:  # it could not be told from a field of the call's own
            cure = "leave it out, or write it where the provider has it"
            raise replies.misfit(FORMAT, f"{path}.{beside}", "is next to the function", cure)
    if kind == "custom":
        return ToolCall(call_id, name, {"input": text}, {**extra, "type": raw("custom")})
    return replies.written_call(call_id, name, text, extra)


def _sent_function(function: Any, path: str, made_id: str) -> ToolCall:
    """Return a call as it was made before there were calls with ids."""
    if not isinstance(function, dict):
        raise replies.misfit(FORMAT, path, "is no object", "give the name and the arguments")
    extra: Extra = {"type": raw("function_call")}
    _keep_beside(extra, "function", function, "arguments")
    name = replies.text_in(FORMAT, function, "name", path)
    return replies.written_call(
        made_id, name, replies.text_in(FORMAT, function, "arguments", path), extra
    )
