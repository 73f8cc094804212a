"""Histories of other programs, for Hypothesis: generated from the SDKs' own types.

`of_type` reads a type of an SDK (a typed dict, a union, a pydantic model) and gives values of it.
What the types do not say is said here: results answer calls, a call's arguments are JSON, what is
said is not blank, an answer does not end with a thought.
"""

from __future__ import annotations

import base64
import json
import types
import typing
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import typing_extensions
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from pydantic.alias_generators import to_camel

Entry = dict[str, Any]

WORDS = st.text('abcé \n🙂"\\{', min_size=1, max_size=8).map(lambda text: f"{text}.")
NAMES = st.sampled_from(["look", "get_weather", "x-1"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, 1e22]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=2)
STYLES = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 3}, {"ensure_ascii": False}]
)
DATA = st.binary(min_size=1, max_size=4).map(lambda data: base64.b64encode(data).decode())


@st.composite
def written(draw: st.DrawFn) -> str:
    """Arguments as a model, or another program, writes them: JSON in one layout or another."""
    return json.dumps(draw(OBJECTS), **draw(STYLES))


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "arguments": written(),
    "data": DATA,
    "file_data": DATA.map(lambda data: f"data:application/pdf;base64,{data}"),
    "url": st.just("https://example.org/a.png"),
    "image_url": st.just("https://example.org/a.png"),
    "file_url": st.just("https://example.org/a.pdf"),
    "fileUri": st.just("https://example.org/a.pdf"),
    "mimeType": st.sampled_from(["image/png", "application/pdf"]),
    "thoughtSignature": DATA,
    "encrypted_content": DATA,
    "signature": DATA,
    "name": NAMES,
    "media_type": st.sampled_from(["image/png", "image/jpeg"]),
    "caller": st.just({"type": "direct"}),
    "cache_control": st.just({"type": "ephemeral"}),
}
"""Fields whose type says less than their name."""


@cache
def of_type(hint: Any, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values of a type; fields that are given are there, with these values.

    Kept, since drawing from what was made before takes a hundredth of the time.
    """
    origin = get_origin(hint)
    if origin in {typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated}:
        return of_type(get_args(hint)[0], **fixed)
    if isinstance(hint, typing_extensions.TypeAliasType):
        return of_type(hint.__value__, **fixed)
    if origin in {Union, types.UnionType}:
        kinds = [one for one in get_args(hint) if one is not type(None)]
        return st.one_of([of_type(one, **fixed) for one in kinds])
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if typing_extensions.is_typeddict(hint):
        return st.deferred(lambda: _typed_dict(hint, fixed))
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return st.deferred(lambda: _model(hint, fixed))
    return _plain(hint, origin)


def _plain(hint: Any, origin: Any) -> st.SearchStrategy[Any]:
    if origin is dict and get_args(hint)[1] is str:
        return st.dictionaries(WORDS, WORDS, max_size=2)
    if origin is dict or hint in {dict, object, Any}:
        return OBJECTS
    if origin is not None:  # an iterable of some kind
        return st.lists(of_type(get_args(hint)[0]), min_size=1, max_size=2)
    if hint is bytes:
        return DATA
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return st.sampled_from([one.value for one in hint])  # type: ignore[attr-defined]
    known = {str: WORDS, int: st.integers(0, 9), float: st.sampled_from([0.5, 2.0])}
    return st.booleans() if hint is bool else known[hint]


@cache
def _hints(hint: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields of a typed dict, and whether each has to be there."""
    hints = typing_extensions.get_type_hints(hint, include_extras=True)
    return {
        name: (one, get_origin(one) is typing_extensions.Required) for name, one in hints.items()
    }


def _field(name: str, hint: Any) -> st.SearchStrategy[Any]:
    return FIELDS[name] if name in FIELDS else of_type(hint)


def _typed_dict(hint: Any, fixed: dict[str, Any]) -> st.SearchStrategy[Any]:
    needed: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for name, (one, is_needed) in _hints(hint).items():
        (needed if is_needed else optional)[name] = _field(name, one)
    optional = {name: one for name, one in optional.items() if name not in fixed}
    return st.fixed_dictionaries({**needed, **fixed}, optional=optional)


def _model(hint: type[BaseModel], fixed: dict[str, Any]) -> st.SearchStrategy[Any]:
    fields = {to_camel(name): field.annotation for name, field in hint.model_fields.items()}
    optional = {name: _field(name, one) for name, one in fields.items() if name not in fixed}
    return st.fixed_dictionaries(fixed, optional=optional)


@cache
def taken(provider: str) -> TypeAdapter[Any]:
    """Return the SDK's type of a message in a request."""
    if provider == "openai":
        from openai.types.chat import ChatCompletionMessageParam

        return TypeAdapter(ChatCompletionMessageParam)
    if provider == "openai-responses":
        from openai.types.responses import ResponseInputItemParam

        return TypeAdapter(ResponseInputItemParam)
    if provider == "anthropic":
        from anthropic.types import MessageParam

        return TypeAdapter(MessageParam)
    from google.genai.types import Content

    return TypeAdapter(Content)


def without_none(value: Any) -> Any:
    """Return a value without fields that say nothing."""
    if isinstance(value, list):
        return [without_none(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: without_none(one) for name, one in value.items() if one is not None}


@cache
def said_in(part: st.SearchStrategy[Entry]) -> st.SearchStrategy[Any]:
    """Return what an answer says: text, parts, or nothing."""
    return WORDS | st.lists(part, min_size=1, max_size=2) | st.none()


@cache
def one_of(*hints: Any) -> st.SearchStrategy[Any]:
    """Return values of one of several types."""
    return st.one_of([of_type(one) for one in hints])


@st.composite
def chat(draw: st.DrawFn) -> list[Entry]:
    """A request's messages for Chat Completions."""
    from openai.types import chat as types_of

    part = of_type(types_of.ChatCompletionContentPartTextParam)
    assistant = types_of.ChatCompletionAssistantMessageParam
    call = one_of(
        types_of.ChatCompletionMessageFunctionToolCallParam,
        types_of.ChatCompletionMessageCustomToolCallParam,
    )
    given = one_of(
        types_of.ChatCompletionSystemMessageParam,
        types_of.ChatCompletionDeveloperMessageParam,
        types_of.ChatCompletionUserMessageParam,
    )
    found: list[Entry] = []
    for turn in range(draw(st.integers(1, 3))):
        found += draw(st.lists(given, max_size=2))
        answer = draw(of_type(assistant, content=said_in(part)))
        calls = draw(st.lists(call, max_size=3))
        for name in ("tool_calls", "function_call", "audio"):
            answer.pop(name, None)
        if calls:
            answer["tool_calls"] = [
                {**one, "id": f"call_{turn}_{at}"} for at, one in enumerate(calls)
            ]
        elif not answer["content"] and not answer.get("refusal"):
            answer["audio"] = {"id": "audio_1"}
        found.append(answer)
        for one in draw(st.permutations(answer.get("tool_calls", []))):
            said = draw(of_type(types_of.ChatCompletionToolMessageParam))
            found.append({**said, "tool_call_id": one["id"]})
        if draw(st.booleans()):
            found += draw(_with_function(types_of))
    return found


@st.composite
def _with_function(draw: st.DrawFn, types_of: Any) -> list[Entry]:
    """A call as it was made before there were ids."""
    function = {"name": draw(NAMES), "arguments": draw(written())}
    asked = {"role": "assistant", "content": None, "function_call": function}
    answer = draw(of_type(types_of.ChatCompletionFunctionMessageParam))
    return [asked, {**answer, "name": function["name"]}]


PAIRS = {
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "program": "program_output",
    "tool_search_call": "tool_search_output",
    "mcp_approval_request": "mcp_approval_response",
}
CALLS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
}


def _kind(hint: Any) -> str:
    one = _hints(hint).get("type", (None, False))[0]
    while one is not None and get_origin(one) is not Literal:
        one = next(arg for arg in get_args(one) if arg is not type(None))
    return "" if one is None else str(get_args(one)[0])


@cache
def _items() -> dict[str, Any]:
    """Return the types of input items, by the kind that they say."""
    from openai.types.responses import ResponseInputItemParam

    found = {_kind(one): one for one in get_args(ResponseInputItemParam)}
    return {kind: one for kind, one in found.items() if kind != "compaction_trigger"}


@st.composite
def items(draw: st.DrawFn) -> list[Entry]:
    """A request's input items for Responses."""
    from openai.types.responses import EasyInputMessageParam, ResponseOutputMessageParam

    kinds = _items()
    answering = {*PAIRS.values(), *CALLS.values()}
    alone = [
        one
        for kind, one in kinds.items()
        if kind not in {*PAIRS, *CALLS, *answering, "message", "reasoning"}
    ]
    easy = of_type(EasyInputMessageParam)
    found: list[Entry] = []
    for turn in range(draw(st.integers(1, 3))):
        found += draw(st.lists(easy, max_size=2))
        if draw(st.booleans()):
            found.append(draw(of_type(kinds["reasoning"])))
        found.append(draw(of_type(ResponseOutputMessageParam)))
        for asks, answers in draw(st.lists(st.sampled_from(list(PAIRS.items())), max_size=1)):
            for kind in (asks, answers):
                has_id = "call_id" in _hints(kinds[kind])
                call = {"call_id": f"call_{turn}"} if has_id else {}
                found.append({**draw(of_type(kinds[kind])), **call})
        found += draw(st.lists(one_of(*alone), max_size=2))
        calls = draw(st.lists(st.sampled_from(list(CALLS)), max_size=3))
        asked = [
            {**draw(of_type(kinds[one])), "call_id": f"call_{turn}_{at}"}
            for at, one in enumerate(calls)
        ]
        found += asked
        for one in draw(st.permutations(asked)):
            answer = draw(of_type(kinds[CALLS[one["type"]]]))
            found.append({**answer, "call_id": one["call_id"]})
    return [_with_id(item, at) for at, item in enumerate(found)]


IDS = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


def _with_id(item: Entry, at: int) -> Entry:
    """Give an item an id as the API makes them; what it says of a thought is for reading only."""
    kind = item.get("type") or "message"
    if kind == "message" and "id" not in item and item["role"] == "assistant":
        item = {**item, "content": "Hm."}  # a part of an answer belongs to an item with an id
    if "id" in item:
        item = {**item, "id": f"{IDS.get(kind, kind)}_{at}"}
    return {name: one for name, one in item.items() if (kind, name) != ("reasoning", "status")}


@st.composite
def anthropic(draw: st.DrawFn) -> list[Entry]:
    """A request's messages for Anthropic."""
    from anthropic import types as types_of

    text = of_type(types_of.TextBlockParam)
    user = one_of(
        types_of.TextBlockParam,
        types_of.ImageBlockParam,
        types_of.DocumentBlockParam,
        types_of.SearchResultBlockParam,
        types_of.ContainerUploadBlockParam,
    )
    thought = one_of(types_of.ThinkingBlockParam, types_of.RedactedThinkingBlockParam)
    asked: list[Entry] = []
    found: list[Entry] = []
    for turn in range(draw(st.integers(1, 3))):
        results = [
            {**draw(of_type(types_of.ToolResultBlockParam)), "tool_use_id": one["id"]}
            for one in draw(st.permutations(asked))
        ]
        results = [{**one, "content": "no"} if one.get("is_error") else one for one in results]
        asked = []
        said = draw(WORDS | st.lists(user, min_size=1, max_size=3))
        if results and isinstance(said, str):
            said = [{"type": "text", "text": said}]
        if results and draw(st.booleans()):
            said = []
        found.append({"role": "user", "content": [*results, *said] if results else said})
        if draw(st.booleans()):
            found.append(draw(of_type(types_of.SystemMessageParam)))
        if draw(st.booleans()):
            found.append({"role": "assistant", "content": draw(WORDS)})
            continue
        blocks = draw(st.lists(thought, max_size=2)) + [draw(text)]
        if draw(st.booleans()):
            blocks += draw(_searched(types_of, f"srvtoolu_{turn}"))
        for at in range(draw(st.integers(0, 3))):
            asked.append({**draw(of_type(types_of.ToolUseBlockParam)), "id": f"toolu_{turn}_{at}"})
        found.append({"role": "assistant", "content": [*blocks, *asked]})
    if asked:
        found.append({"role": "user", "content": [_answered(one) for one in asked]})
    return _with_few_markers(found, [4])


def _with_few_markers(value: Any, room: list[int]) -> Any:
    if isinstance(value, list):
        return [_with_few_markers(one, room) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("cache_control"), dict):
        room[0] -= 1
        if room[0] < 0:
            value = {name: one for name, one in value.items() if name != "cache_control"}
    return {name: _with_few_markers(one, room) for name, one in value.items()}


def _answered(call: Entry) -> Entry:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}


@st.composite
def _searched(draw: st.DrawFn, types_of: Any, call_id: str) -> list[Entry]:
    """A call of one of the provider's own tools, and its result."""
    result = draw(
        one_of(
            types_of.WebSearchToolResultBlockParam,
            types_of.WebFetchToolResultBlockParam,
            types_of.BashCodeExecutionToolResultBlockParam,
        )
    )
    call = {**draw(of_type(types_of.ServerToolUseBlockParam)), "id": call_id}
    return [call, {**result, "tool_use_id": call_id}]


@cache
def part(*names: str) -> st.SearchStrategy[Entry]:
    """Return parts of Gemini's with one of these fields."""
    from google.genai.types import Part

    hints = {to_camel(name): one.annotation for name, one in Part.model_fields.items()}
    # An image without data is refused: the type alone would allow it.
    fields = {name: _field(name, hints[name]) for name in names}
    if "inlineData" in fields:
        fields["inlineData"] = fields["inlineData"].filter(
            lambda one: bool(one.get("data")) and bool(one.get("mimeType"))
        )
    beside = {name: of_type(hints[name]) for name in ("partMetadata", "mediaResolution")}
    return st.one_of(
        [st.fixed_dictionaries({name: field}, optional=beside) for name, field in fields.items()]
    )


SIGNED = st.fixed_dictionaries({}, optional={"thoughtSignature": DATA})


@st.composite
def contents(draw: st.DrawFn) -> list[Entry]:
    """A request's contents for Gemini."""
    from google.genai import types as types_of

    found: list[Entry] = []
    for turn in range(draw(st.integers(1, 3))):
        shown = draw(st.lists(part("text", "inlineData", "fileData"), min_size=1, max_size=3))
        found.append({"role": "user", "parts": shown})
        said = [{**one, **draw(SIGNED)} for one in draw(st.lists(part("text"), max_size=2))]
        if draw(st.booleans()):
            said.append({"text": draw(WORDS), "thought": True, **draw(SIGNED)})
        said += draw(st.lists(part("executableCode", "codeExecutionResult"), max_size=1))
        has_ids = draw(st.booleans())
        calls = []
        for at in range(draw(st.integers(0, 3))):
            named = {"id": f"fc_{turn}_{at}"} if has_ids else {}
            call = draw(of_type(types_of.FunctionCall, name=NAMES))
            call.pop("id", None)
            calls.append({**call, **named})
        signature = {"thoughtSignature": draw(DATA)}  # of the first one
        for call in calls:
            said.append({"functionCall": call, **signature})
            signature = draw(SIGNED)
        if all(one.get("thought") for one in said):
            continue
        found.append({"role": "model", "parts": said})
        if calls:
            found += draw(_responses(types_of, calls, has_ids=has_ids))
    return found


@st.composite
def _responses(draw: st.DrawFn, types_of: Any, calls: list[Entry], *, has_ids: bool) -> list[Entry]:
    parts = []
    for call in draw(st.permutations(calls)) if has_ids else calls:
        answer = {**draw(of_type(types_of.FunctionResponse)), "name": call["name"]}
        answer.pop("id", None)
        kinds = [{"output": draw(VALUES)}, {"result": draw(VALUES)}, {"error": draw(WORDS)}]
        answer["response"] = draw(st.sampled_from([*kinds, draw(OBJECTS)]))
        named = {"id": call["id"]} if has_ids else {}
        parts.append({"functionResponse": {**answer, **named}})
    role = draw(st.sampled_from(["user", "function"]))
    if draw(st.booleans()):
        return [{"role": role, "parts": [part]} for part in parts]
    return [{"role": role, "parts": parts}]


HISTORIES: dict[str, st.SearchStrategy[list[Entry]]] = {
    "openai": chat(),
    "openai-responses": items(),
    "anthropic": anthropic(),
    "gemini": contents(),
}
