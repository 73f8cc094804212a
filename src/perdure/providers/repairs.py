"""Repairs of a rendered request, where the table of rules asks for them.

A renderer writes what messages say; a history has it as its program wrote it, and the providers
refuse some of that. One pass over the rendered request finds what breaks a rule of
`perdure.providers.request_rules` and does what the rule says. A request that breaks none, as nearly
all do, is returned as it is.

Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from perdure.providers.context_fit import (
    LISTS,
    ContextTarget,
    Format,
    RenderedContext,
    function_name,
)
from perdure.providers.parts import Part, Text, Unknown, plain, read_part
from perdure.providers.request_rules import RULES, Cure, Place, Rule, Walk, broken, places

Shaped = Callable[[Part, Any], dict[str, Any]]
"""Returns a part in a provider's shape."""


def repaired(context: RenderedContext, target: ContextTarget, shaped: Shaped) -> RenderedContext:
    """Return a context that keeps every rule of its provider's table."""
    rules = [
        rule
        for rule in RULES[context.format]
        if rule.cure in _CURES and not (rule.official and target.issuer.provider != target.format)
    ]
    name = LISTS[context.format]
    request = {name: context.messages, "system": context.system}
    telling = {
        **request,
        name: [one for one in context.messages if not _is_words(one, context.format)],
    }
    walk = Walk(telling)
    if not any(broken(rule, telling, walk) for rule in rules):
        return context
    request = copy.deepcopy(request)  # what a history had in it is the messages' own
    for rule in rules:
        _CURES[rule.cure](broken(rule, request), rule, request, shaped)
    messages: Any = request[name]
    return msgspec.structs.replace(context, messages=messages, system=request["system"])


def _is_words(message: dict[str, Any], format: Format) -> bool:
    """Say whether a message has nothing but a role and text, as most do: that breaks no rule."""
    if len(message) != 2 or "role" not in message:
        return False
    if format == "gemini":
        parts: Any = message.get("parts")
        is_one = isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict)
        return is_one and parts[0].keys() == {"text"}
    return isinstance(message.get("content"), str)


def _left_out(found: Sequence[Place], rule: Rule, *_: Any) -> None:
    for owner, key in reversed(found):
        if rule.names is None:
            del owner[key]
        else:
            owner[key] = {name: value for name, value in owner[key].items() if name in rule.names}


def _renamed(found: Sequence[Place], *_: Any) -> None:
    for owner, key in found:
        if owner[key]:
            owner[key] = function_name(str(owner[key]))
        else:
            del owner[key]


def _noted(found: Sequence[Place], *_: Any) -> None:
    for owner, key in found:
        owner[key] = {"type": "text", "text": plain(read_part(owner[key]))}


def _shaped(found: Sequence[Place], _rule: Rule, _request: Any, shaped: Shaped) -> None:
    for owner, key in found:
        source, part = owner[key], read_part(owner[key])
        marks = {"cache_control": source["cache_control"]} if "cache_control" in source else {}
        if isinstance(part, Unknown):
            part, source = Text(plain(part)), None
        owner[key] = {**marks, **shaped(part, None)}


def _as_text(found: Sequence[Place], *_: Any) -> None:
    for owner, key in found:
        owner[key] = _in_words(owner[key])


def _in_words(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as its words: without an id it cannot be the provider's own item."""
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(plain(read_part(part)) for part in content)
    phase = {"phase": item["phase"]} if "phase" in item else {}
    return {**phase, "role": item["role"], "content": content or ""}


def _blank(found: Sequence[Place], *_: Any) -> None:
    for owner, key in found:
        owner[key] = ""
        if owner.get("type") == "message" and owner.get("role") == "assistant":
            for name in {"type", "id", "status"} & set(owner):
                del owner[name]


def _newest(found: Sequence[Place], rule: Rule, request: Any, _: Shaped) -> None:
    """Keep the last marker of the instructions, which are the same in each request, and the newest
    ones: what came before those was written to the cache by the requests before."""
    assert rule.most is not None
    system = len(places(request, rule.fields[0]))
    kept = found[system:][-(rule.most - bool(system)) :]
    room = rule.most - len(kept)
    _left_out(found[: system - room if system > room else 0], rule)
    _left_out(found[system : len(found) - len(kept)], rule)


def _shortened(found: Sequence[Place], *_: Any) -> None:
    for place in found:
        del place.value["ttl"]


def _apart(found: Sequence[Place], _rule: Rule, request: Any, _: Shaped) -> None:
    """Put what is no text in a failed result after the results of the same message."""
    wrong = [id(place.value) for place in found]
    for message in request["messages"]:
        blocks = message["content"]
        if not isinstance(blocks, list):
            continue
        moved: list[Any] = []
        for block in blocks:
            if id(block) not in wrong:
                continue
            content = block.get("content")
            parts = content if isinstance(content, list) else []
            moved += [part for part in parts if part.get("type") in _OF_USERS]
            texts = [
                part
                if part.get("type") == "text"
                else {"type": "text", "text": plain(Unknown(part))}
                for part in parts
                if part.get("type") not in _OF_USERS
            ]
            block["content"] = texts or "failed"
        results = [at for at, one in enumerate(blocks, 1) if one.get("type") == "tool_result"]
        end = max(results, default=0)
        blocks[end:end] = moved


_OF_USERS: Final = frozenset({"image", "document", "search_result"})
"""The types of blocks that a result may have and a user's message, too."""


def _no_id(found: Sequence[Place], _rule: Rule, request: Any, _: Shaped) -> None:
    wrong = {id(place.owner) for place in found}
    items: list[dict[str, Any]] = []
    for item in request["input"]:
        if id(item) not in wrong:
            items.append(item)
        elif item.get("role") == "assistant":
            items.append(_in_words(item))
        elif item.get("type") not in {None, "item_reference"}:
            items.append({name: value for name, value in item.items() if name != "id"})
    request["input"] = items


_CURES: Final[Mapping[Cure, Callable[[Sequence[Place], Rule, Any, Shaped], None]]] = {
    "left out": _left_out,
    "renamed": _renamed,
    "note": _noted,
    "shaped": _shaped,
    "as text": _as_text,
    "blank": _blank,
    "newest": _newest,
    "shortened": _shortened,
    "apart": _apart,
    "no id": _no_id,
}
