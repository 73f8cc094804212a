"""Media anywhere in a message come back to the letter, wherever the message has been."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

import anyio
import msgspec
from hypothesis import Phase, given, settings, strategies as st

import perdure
from perdure import Limits, Message, Shutdown, ToolCall, register
from perdure.providers import FORMATS
from perdure.records.media import LEAST
from perdure.session.session import Session, SessionView
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.images import encoded, part, png, url


@dataclass
class Shot:
    """A screenshot that takes nothing but an image."""

    image: str
    data: bytes = b""

    def __post_init__(self) -> None:
        if not self.image.startswith("data:image/png;base64,"):
            raise ValueError(self.image[:40])


SHOT = register(Shot, tag="shot")
LARGE, OTHER, SMALL, SOUND = png(LEAST, 1), b"%PDF-1.7" + bytes(LEAST), png(2000, 2), bytes(LEAST)
FIELDS = f"data:image/png:70000:1x1:{'a' * 64}"

# Examples are made of names, and these stand for what is prepared once: bytes that are generated
# would be shrunk one by one, and each example's repr would have them.
NAMED: dict[str, Any] = {
    "<png>": part(LARGE),
    "<small>": part(SMALL),
    "<gemini>": {"inlineData": {"mimeType": "image/png", "data": encoded(LARGE)}},
    "<sound>": {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}},
    "<pdf>": {"type": "file", "file": {"file_data": url(OTHER)}},
    "<aside>": {"data": encoded(OTHER), "note": {"mimeType": "text/plain"}},
}
TYPED: dict[str, Any] = {
    "<bytes>": LARGE,
    "<bytes named>": {"data": LARGE, "mime_type": "image/png"},
    "<shot>": {"shot": Shot(url(LARGE), LARGE), "data": encoded(LARGE)},
    "<dated>": {"at": date(2026, 1, 2), "parts": [part(LARGE), part(OTHER)]},
    "<pair>": (url(LARGE), date(2026, 1, 2)),
    "<set>": frozenset([url(LARGE), url(OTHER)]),
}
WORDS = {
    "<url>": url(LARGE),
    "<small url>": url(SMALL),
    "<other url>": url(OTHER),
    "<base64>": encoded(LARGE),
    "<reference>": f"perdure:media:{FIELDS}",
    "<signed>": f"perdure:media:{'b' * 64}:{FIELDS}",
    "<spelled>": f"\\u0070erdure:media:{FIELDS}",
}
TEXTS = [
    "look",
    *WORDS,
    'he said "<url>',
    '"<url>"',
    '{"data": "<base64>", "url": "<other url>"}',
    '"<reference>"',
    '"<spelled>"',
    "perdure:media:",
]
KEYS = [
    "data",
    "result",
    "text",
    "content",
    "url",
    'x"data',
    "arguments_types",
    "<url>",
    "<signed>",
]


def within(leaves: list[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from([None, 7, *TEXTS, *leaves]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)
        ),
        max_leaves=4,
    )


texts, parts, values = st.sampled_from(TEXTS), within([*NAMED]), within([*NAMED, *TYPED])
extras = st.dictionaries(st.sampled_from(["seen", "notes"]), parts, max_size=1)
said = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": texts | st.lists(parts, max_size=3),
        "image_urls": st.lists(texts, max_size=1),
        "extra": extras,
    },
    optional={"reasoning": texts},
)
called = st.fixed_dictionaries({"id": texts, "arguments": values, "extra": extras})
returned = st.fixed_dictionaries({"result": values, "error": st.none() | texts})


def made(value: Any) -> Any:
    """Return a value with what its names stand for."""
    if isinstance(value, list):
        return [made(inner) for inner in value]
    if isinstance(value, dict):
        return {made(name): made(inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value in NAMED or value in TYPED:
        return NAMED.get(value, TYPED.get(value))
    for name, text in WORDS.items():
        value = value.replace(name, text)
    return value


def message_of(recipe: dict[str, Any]) -> Message:
    fields: dict[str, Any] = made(recipe)
    extra = {
        name: msgspec.Raw(json.dumps(value).encode())
        for name, value in fields.pop("extra", {}).items()
    }
    if "role" in fields:
        return Message(**fields, extra=extra)
    if "id" in fields:
        call = ToolCall(fields["id"], "look", fields["arguments"], extra=extra)
        return Message("assistant", tool_calls=[call])
    return Message.tool("a", fields["result"], error=fields["error"])


def letters(message: Message) -> Any:
    """Return what a message says, raw JSON as values."""
    result = message.tool_result
    return [
        *(message.role, message.content, message.reasoning, message.image_urls),
        {name: json.loads(bytes(raw)) for name, raw in message.extra.items()},
        [
            (
                call.id,
                call.arguments,
                {name: json.loads(bytes(raw)) for name, raw in call.extra.items()},
            )
            for call in message.tool_calls
        ],
        None if result is None else (result.result, result.error),
    ]


def require_same(where: str, shown: list[Message], messages: list[Message]) -> None:
    same = [letters(one) for one in shown] == [letters(one) for one in messages]
    if not same:  # without pytest's explanation: a diff of base64 takes minutes
        raise AssertionError(f"{where}: something came back otherwise")


async def require_back(where: str, session: Session | SessionView, messages: list[Message]) -> None:
    require_same(where, session.context(), messages)
    history = [item.value for item in await session.history()]
    require_same(f"{where}, history", history, messages)
    if "erdure:media:" not in str(messages):
        for format in FORMATS:
            found = "erdure:media:" in str(session.context(format))
            if found:
                raise AssertionError(f"{where}: {format} is shown a reference")


async def there_and_back(messages: list[Message]) -> None:
    backing = MemoryBacking()
    limits = Limits(context_media_tokens=10**9, context_bytes=10**9, media_tokens=0)
    options: Any = {"limits": limits, "types": [SHOT], "shutdown": Shutdown(signals=False)}
    async with perdure.connect(MemoryStore(backing=backing), **options) as sessions:
        async with sessions.open("ada") as session:
            session.append(*messages)
            await require_back("live", session, messages)
            await session.save()
            await require_back("saved", session, messages)
    async with perdure.connect(MemoryStore(backing=backing), **options) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        await require_back("loaded", view, messages)
        async with sessions.open("ada") as session:
            await require_back("opened again", session, messages)
        await sessions.fork("ada", "bo")
        await sessions.copy("ada", "cy")
        for other in ("bo", "cy"):
            async with sessions.open(other) as session:
                await require_back(other, session, messages)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(said | called | returned, min_size=1, max_size=3),
    st.sampled_from(["asyncio", "trio"]),
)
def test_media_anywhere_in_a_message_come_back_to_the_letter(
    recipes: list[dict[str, Any]], backend: str
) -> None:
    # Not in virtual time: large records are taken apart in a thread.
    anyio.run(there_and_back, [message_of(recipe) for recipe in recipes], backend=backend)
