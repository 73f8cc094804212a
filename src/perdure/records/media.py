r"""Media in records: images, documents, audio and video, as base64 or as references to blobs.

A message may hold media as every provider takes it: a ``data:`` URL, or base64 next to its type.
Media of `LEAST` bytes and more leave a record when it is saved: `lifted` puts a reference where the
base64 was, and `filled` puts the base64 back, to the letter.

    "data":"\u0070erdure:media:data:image/png:1258291:1280x800:<sha256>"
    "url":"\u0070erdure:media:url:image/jpeg:81920:640x480:<sha256>"

`perdure.records.references` says why nothing else is ever read as one. The hash is the blob's name,
and `perdure.records.chunks.named_in` finds it, as it finds all others. Lifting is idempotent and a
function of the bytes alone. Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.messages import (
    Message,
    ToolCall,
    ToolResult,
    decode_message,
    encode_message,
)
from perdure.records.records import ADMITTED, CONTEXT, MESSAGE_KINDS, Entry
from perdure.records.references import FIELDS, HELD, SPELLED, held, held_fields
from perdure.records.values import NO_TYPES, Types, escape

LEAST: Final = 64 * 1024
"""Bytes of an image, or other media, from which on it becomes a blob."""
LIFTED_KINDS: Final = MESSAGE_KINDS | {CONTEXT, ADMITTED}
"""Kinds of records whose media become blobs."""
MOST: Final = MAX_RECORD_BYTES * 3 // 4
"""Bytes of media that one record refers to: all of them were in it, as base64."""
SEEN: Final = 1024
"""Characters of base64 from which on text counts as media, in records."""

MediaKind = Literal["image", "audio", "video", "document"]

_RUN = rb"[A-Za-z0-9+/]{%d,}+={0,2}" % SEEN
# A quote that a backslash precedes is within a string; what a colon follows is a name.
_URL = re.compile(rb'(?<!\\)"data:([a-z]+/[A-Za-z0-9.+-]+);base64,(' + _RUN + rb')"(?!\s*:)')
_DATA = re.compile(rb'(?<!\\)"(?:data|blob|file_data|result)": ?"(' + _RUN + rb')"')
_REFERENCE = re.compile(rb'(?<!\\)"\\u0070erdure:media:' + FIELDS + b'"')
_HELD_RAW = re.compile(b'"' + HELD.encode() + b"[0-9a-f]{64}:" + FIELDS + b'"')
_TYPED = re.compile(rb'"(?:media_type|mimeType|mime_type)": ?"([a-z]+/[A-Za-z0-9.+-]+)[";]')
_BRACE = re.compile(rb"[{}]")
_FORMATTED = re.compile(rb'"format": ?"([a-z0-9]{2,5})"')
_TABLE: Final = b'_types"'
"""The end of the name of a table of types, which is next to values that are not all JSON."""
_AROUND: Final = 400
"""Bytes next to base64 among which its type is looked for."""
_HEAD: Final = 128 * 1024
"""Characters of base64 among which an image says how large it is."""
_DATA_KEYS: Final = frozenset({"data", "blob", "file_data", "result"})
_MARKS: Final = (b";base64,", HELD.encode(), *(b'"%b":"' % key.encode() for key in _DATA_KEYS))
_NAMED: Final = tuple(b'"%b":' % key.encode() for key in _DATA_KEYS)
_IN_TEXT: Final = (b'"text":', b'"content":')
_TEXT_KEYS: Final = frozenset({"text", "content"})
_TYPE_KEYS: Final = ("media_type", "mimeType", "mime_type")
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"\x1aE\xdf\xa3", "video/webm"),
)
PIXEL: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5E"
    "rkJggg=="
)
"""An image of one pixel, where only an image may stand."""


class Medium(msgspec.Struct, frozen=True):
    """One image, document, sound or video in a message."""

    type: str
    """Its media type, such as ``image/png``."""
    bytes: int
    width: int = 0
    """Pixels, as its header says; 0 if that is not known."""
    height: int = 0
    name: str = ""
    """The blob that it is in; empty while it is in the message."""

    @property
    def kind(self) -> MediaKind:
        """Its kind, by its type."""
        family = self.type.partition("/")[0]
        return family if family in {"image", "audio", "video"} else "document"  # type: ignore[return-value]  # one of three


class _Place(NamedTuple):
    """Media in a record: where its string begins and ends, quotes included."""

    start: int
    end: int
    form: str
    type: str
    data: bytes


def note_of(medium: Medium, why: str) -> str:
    """Return what the model reads in its place.

    >>> note_of(Medium("image/png", 1_258_291), "left out: the budget for media is spent")
    '[image/png, 1.2 MB, left out: the budget for media is spent]'
    """
    size = medium.bytes
    amount = f"{size / 1024**2:.1f} MB" if size >= 1024**2 else f"{max(size // 1024, 1)} KB"
    return f"[{medium.type}, {amount}, {why}]"


# In the bytes of a record


def _places(payload: bytes) -> list[_Place]:
    """Return the base64 of media in a record, in order.

    What has a type of Python's is none: the type reads all of it, and the model reads it as text.
    """
    if not _has_long_run(payload):
        return []
    places = [
        _Place(found.start(), found.end(), "url", found[1].decode(), found[2])
        for found in (_URL.finditer(payload) if b";base64," in payload else ())
        if not payload.endswith(_IN_TEXT, 0, found.start())
    ]
    for found in _DATA.finditer(payload) if any(name in payload for name in _NAMED) else ():
        media_type = _type_beside(payload, found.start(), found.end(), found[1])
        if media_type is not None:
            start = found.start(1) - 1
            places.append(_Place(start, found.end(), "data", media_type, found[1]))
    if places and _TABLE in payload:
        typed = _typed(msgspec.json.decode(payload))
        places = [one for one in places if payload[one.start + 1 : one.end - 1] not in typed]
    return sorted(places)


def _has_long_run(payload: bytes) -> bool:
    """Return whether there are so many bytes without a space, as in any base64 of media."""
    at, end = 0, len(payload)
    while end - at >= SEEN:
        space = payload.rfind(b" ", at, at + SEEN)
        if space < 0:
            return True
        at = space + 1
    return False


def _typed(record: Any) -> set[bytes]:
    """Return the strings in a record that a table of types, next to their value, has a type for."""
    typed: set[bytes] = set()
    rest = [record]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            for name in ("arguments", "tool_result"):
                types = value.get(f"{name}_types")
                if isinstance(types, dict):
                    typed.update(text.encode() for text in _texts(value.get(name), types, ""))
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return typed


def _texts(value: Any, types: Container[str], at: str | None) -> Iterator[str]:
    """Yield the strings at or below a place that has a type; None for being below one."""
    at = None if at in types else at
    if isinstance(value, str):
        if at is None:
            yield value
    elif isinstance(value, (list, dict)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, types, None if at is None else f"{at}/{escape(str(name))}")


def _type_beside(payload: bytes, start: int, end: int, data: bytes) -> str | None:
    """Return the type that is in the same object, or that the data shows; None for neither."""
    # Up to the next brace: after it begins another object, or ends this one.
    before = _BRACE.split(payload[max(start - _AROUND, 0) : start])[-1]
    beside = before + _BRACE.split(payload[end : end + _AROUND], 1)[0]
    typed = _TYPED.search(beside)
    if typed is not None:
        return typed[1].decode()
    shown = sniffed(_decoded(data[:64]) or b"")
    formatted = _FORMATTED.search(beside)
    return f"audio/{formatted[1].decode()}" if shown is None and formatted is not None else shown


def sniffed(head: bytes) -> str | None:
    """Return the type that the first bytes of a file show, None for none that is known."""
    for magic, media_type in _MAGIC:
        if head.startswith(magic):
            return media_type
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12])
    return "video/mp4" if head[4:8] == b"ftyp" else None


def _decoded(data: bytes) -> bytes | None:
    try:
        return base64.b64decode(data[: len(data) // 4 * 4], validate=True)
    except binascii.Error:
        return None


def _is_canonical(data: bytes, raw: bytes) -> bool:
    """Say whether bytes are encoded to this base64: only its end may be written otherwise."""
    rest = len(raw) % 3 or 3
    return len(data) % 4 == 0 and base64.b64encode(raw[-rest:]) == data[-4:]


def lifted(payload: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return a record with references where its media were, and these media by their hashes.

    The same object, and none, where nothing is large enough.
    """
    if len(payload) < LEAST:
        return payload, {}
    parts: list[bytes] = []
    blobs: dict[str, bytes] = {}
    done = 0
    for place in _places(payload):
        if len(place.data) * 3 // 4 < LEAST:
            continue
        raw = _decoded(place.data)
        if raw is None or not _is_canonical(place.data, raw):
            continue  # it would not come back to the letter
        width, height = dimensions(raw)
        name = hashlib.sha256(raw).hexdigest()
        blobs[name] = raw
        where = f"{place.form}:{place.type}:{len(raw)}:{width}x{height}:{name}"
        parts += [payload[done : place.start], SPELLED + f'{where}"'.encode()]
        done = place.end
    if not blobs:
        return payload, {}
    return b"".join([*parts, payload[done:]]), blobs


def lifted_entries(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], dict[str, bytes]]:
    """Return entries with references to their media, and these by their hashes."""
    if not may_lift(entries):
        return entries, {}
    blobs: dict[str, bytes] = {}
    changed: list[Entry] = []
    for entry in entries:
        payload = entry.payload
        if entry.kind in LIFTED_KINDS:
            payload, found = lifted(payload)
            blobs |= found
        changed.append(entry if payload is entry.payload else entry._replace(payload=payload))
    return tuple(changed), blobs


def may_lift(entries: tuple[Entry, ...]) -> bool:
    """Say at a glance whether a record may hold media that become blobs."""
    for entry in entries:  # noqa: SIM110  # for each append
        if len(entry[1]) > LEAST and entry[0] in LIFTED_KINDS:
            return True
    return False


def holds_references(payload: bytes) -> bool:
    """Say whether a record refers to media in blobs."""
    return b"\\" in payload and SPELLED in payload  # a single byte is found a hundred times as fast


def severed(payload: bytes, names: Container[str]) -> bytes:
    """Return a record whose references to other blobs than these are to none: theirs is lost."""

    def reference(found: re.Match[bytes]) -> bytes:
        name = found[6].decode()
        return found[0] if name in names else found[0].replace(found[6], b"0" * len(name))

    return _REFERENCE.sub(reference, payload) if holds_references(payload) else payload


def referred(payload: bytes) -> list[Medium]:
    """Return the media in blobs that a record refers to, in order."""
    if not holds_references(payload):
        return []
    return [
        _referred(found[0][len(SPELLED) : -1].decode()) for found in _REFERENCE.finditer(payload)
    ]


def _referred(fields: str) -> Medium:
    _, media_type, size, pixels, name = fields.split(":")
    width, height = pixels.split("x")
    return Medium(media_type, int(size), int(width), int(height), name)


def _growth(reference: re.Match[bytes]) -> int:
    """Return how many bytes a reference's medium takes more than it."""
    head = len(b"data:;base64,") + len(reference[2]) if reference[1] == b"url" else 0
    return head + 2 + (int(reference[3]) + 2) // 3 * 4 - len(reference[0])


def filled_bytes(payload: bytes) -> int:
    """Return how many bytes a record takes with its media in their places."""
    if not holds_references(payload):
        return len(payload)
    return len(payload) + sum(map(_growth, _REFERENCE.finditer(payload)))


def filled(payload: bytes, blobs: Mapping[str, bytes]) -> bytes:
    """Return a record with the media that are known in their places.

    A reference stays where the record would be larger than one may be, and where it says another
    size than its blob has.
    """
    if not holds_references(payload):
        return payload
    room = MAX_RECORD_BYTES - len(payload)

    def data(found: re.Match[bytes]) -> bytes:
        nonlocal room
        raw = blobs.get(found[6].decode())
        if raw is None or len(raw) != int(found[3]) or room < _growth(found):
            return found[0]
        room -= _growth(found)
        head = b"data:%b;base64," % found[2] if found[1] == b"url" else b""
        return b'"%b%b"' % (head, base64.b64encode(raw))

    return _REFERENCE.sub(data, payload)


def text_bytes(payload: bytes) -> int:
    """Return how many bytes of a record are text: all but the base64 of media."""
    size = len(payload)
    for place in _places(payload):
        size -= len(place.data)
    return size


def without_media(payload: bytes, why: str) -> bytes:
    """Return JSON with notes where media were."""
    parts: list[bytes] = []
    done = 0
    for place in _places(payload):
        medium = _medium(place.data[:_HEAD], len(place.data), place.type)
        note = msgspec.json.encode(note_of(medium, why))
        parts += [payload[done : place.start], note]
        done = place.end
    return b"".join([*parts, payload[done:]])


def _medium(head: bytes, length: int, media_type: str) -> Medium:
    """Return the media of so many characters of base64 that begin with these."""
    width, height = dimensions(_decoded(head) or b"")
    return Medium(media_type, length * 3 // 4, width, height)


# In a message


Decide = Callable[[Medium, str], str | None]
"""Returns the string in place of media, and None to leave them out."""


def with_media(message: Message, decide: Decide, why: Callable[[Medium], str]) -> Message:
    """Return a message with its media as they are decided on; the same one if nothing changes.

    What is left out leaves a note, and in fields that only a provider reads, an image of one pixel.
    It is asked for in content, results and URLs, and then for what a record refers to anywhere
    else: no reference to a blob is ever shown.
    """
    if not may_hold_media(_values(message)):
        return message
    walk = _Walk(decide, why)
    walked = _walked(message, walk)
    if not may_hold_media(walked, (HELD.encode(),)):
        return walked
    changed: Message = walk.rest(walked)
    return changed


def _walked(message: Message, walk: _Walk) -> Message:
    """Return a message with its media as they are decided on, where media are looked for."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    content: Any = message.content
    if isinstance(content, list):
        content = walk.value(content)
    result = message.tool_result
    if result is not None:
        value = result.result
        value = walk.string(value, None, None) if isinstance(value, str) else walk.value(value)
        value = value.text if isinstance(value, _Note) else value
        if value is not result.result:
            changes["tool_result"] = msgspec.structs.replace(result, result=value)
    for name in ("image_urls", "audio_urls", "video_urls"):
        urls: tuple[str, ...] = getattr(message, name)
        shown = [walk.string(url, None, None) for url in urls]
        kept = tuple(url for url in shown if isinstance(url, str))
        notes += [note.text for note in shown if isinstance(note, _Note)]
        if kept != urls:
            changes[name] = kept
    if notes and isinstance(content, list):
        content = [*content, *({"type": "text", "text": note} for note in notes)]
    elif notes:
        content = "\n".join([*([content] if content else []), *notes])
    if content is not message.content:
        changes["content"] = content
    return msgspec.structs.replace(message, **changes) if changes else message


def _values(message: Message) -> tuple[Any, ...]:
    """Return what a message holds, without the names of its own fields: one is a mark."""
    result = message.tool_result
    return (
        message.content,
        message.reasoning,
        message.tool_calls,
        None if result is None else msgspec.structs.astuple(result),
        message.image_urls,
        message.audio_urls,
        message.video_urls,
        message.extra,
        message.payload_extra,
    )


def may_hold_media(value: Any, marks: Sequence[bytes] = _MARKS) -> bool:
    """Say whether a walk over a value may find media: it takes long, and most have none."""
    try:
        data = msgspec.json.encode(value, enc_hook=str)
    except (TypeError, ValueError, RecursionError):
        return True
    return any(mark in data for mark in marks)


LOST: Final = "lost: its blob is missing or damaged"


def noted(message: Message, why: str) -> Message:
    """Return a message with notes where its media were."""
    return with_media(message, lambda _medium, _text: None, lambda _: why)


def decode_held(payload: bytes, registry: Types = NO_TYPES) -> Message:
    """Return the message of a record, with references to media where it has some."""
    return decode_message(held(payload), registry)


def decode_read(payload: bytes, registry: Types = NO_TYPES) -> Message:
    """Return the message of a record that was read with its media, with notes for lost ones."""
    if not holds_references(payload):
        return decode_message(payload, registry)
    message = decode_held(payload, registry)
    return with_media(message, lambda medium, text: None if medium.name else text, lambda _: LOST)


def without_references(payload: bytes) -> bytes:
    """Return a record, or a context's snapshot, with notes where it still refers to media."""
    if not holds_references(payload):
        return payload
    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    if "role" in fields:
        return encode_message(decode_read(payload)).payload
    if "messages" in fields:
        messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
        whole = [msgspec.Raw(without_references(bytes(message))) for message in messages]
        fields["messages"] = msgspec.Raw(msgspec.json.encode(whole))
    if "message" in fields:
        fields["message"] = msgspec.Raw(without_references(bytes(fields["message"])))
    return msgspec.json.encode(fields)


class _Note(msgspec.Struct, frozen=True):
    """A note in the place of media that are left out."""

    text: str


class _Walk:
    """A walk over a message that changes the media in it; what does not change is shared."""

    def __init__(self, decide: Decide, why: Callable[[Medium], str]) -> None:
        self._decide = decide
        self._why = why
        # By the reference: the rest of the message asks for none again.
        self._decided: dict[str, str | None] = {}

    def value(self, value: Any, *, listed: bool = False) -> Any:
        """Return a value with its media as decided; a listed part is replaced as a whole."""
        if isinstance(value, list):
            items = [self._listed(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else items
        if isinstance(value, dict):
            return self._object(value, listed=listed)
        return value

    def _listed(self, item: Any) -> Any:
        if isinstance(item, str):
            text = self.string(item, None, None)
            return text.text if isinstance(text, _Note) else text
        new = self.value(item, listed=True)
        return {"type": "text", "text": new.text} if isinstance(new, _Note) else new

    def _object(self, value: dict[str, Any], *, listed: bool) -> Any:
        changed: dict[str, Any] = {}
        note: _Note | None = None
        for key, inner in value.items():
            new = (
                self.string(inner, key, value)
                if isinstance(inner, str)
                else self.value(inner, listed=listed and isinstance(inner, dict))
            )
            if isinstance(new, _Note):
                note = note or new
                is_screen = value.get("type") == "computer_screenshot"
                new = f"data:image/png;base64,{PIXEL}" if is_screen else new.text
            if new is not inner:
                changed[key] = new
        if listed and note is not None:
            return note  # once all of them were asked for
        return {**value, **changed} if changed else value

    def string(self, text: str, key: str | None, beside: Mapping[str, Any] | None) -> str | _Note:
        """Return the replacement of a string: itself unless it is media."""
        medium = medium_of(text, key, beside)
        if medium is None:
            return text
        decided = self._decide(medium, text)
        if medium.name:
            self._decided[text] = decided
        return _Note(note_of(medium, self._why(medium))) if decided is None else decided

    # To the references where media are not looked for. A value of a type of Python's has none.

    def rest(self, value: Any) -> Any:
        """Return a value without references; what has none is shared."""
        if isinstance(value, str):
            fields = held_fields(value)
            if fields is None:
                return value
            medium = _referred(fields)
            answer = self._answer(medium, value)
            return note_of(medium, self._why(medium)) if answer is None else answer
        if isinstance(value, msgspec.Raw):
            data = bytes(value)
            return msgspec.Raw(_HELD_RAW.sub(self._raw, data)) if HELD.encode() in data else value
        if isinstance(value, (list, tuple)):
            items = [self.rest(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        if isinstance(value, dict):
            return self._named(value)
        return self._fields(value) if isinstance(value, (Message, ToolCall, ToolResult)) else value

    def _raw(self, found: re.Match[bytes]) -> bytes:
        """Return what goes into a provider's field, which only the provider reads: no note."""
        text = found[0][1:-1].decode()
        fields = held_fields(text)
        if fields is None:
            return found[0]
        answer = self._answer(_referred(fields), text)
        if answer is None:
            answer = f"data:image/png;base64,{PIXEL}" if found[1] == b"url" else PIXEL
        return msgspec.json.encode(answer)

    def _answer(self, medium: Medium, text: str) -> str | None:
        if text not in self._decided:
            self._decided[text] = self._decide(medium, text)
        return self._decided[text]

    def _named(self, value: dict[Any, Any]) -> Any:
        changed: dict[Any, Any] = {}
        same = True
        for name, inner in value.items():
            new_name, new = self.rest(name), self.rest(inner)
            same = same and new_name is name and new is inner
            while new_name is not name and new_name in changed:
                new_name += "."  # two notes alike
            changed[new_name] = new
        return value if same else changed

    def _fields(self, value: Message | ToolCall | ToolResult) -> Any:
        changed = {
            name: new
            for name in value.__struct_fields__
            if (new := self.rest(old := getattr(value, name))) is not old
        }
        return msgspec.structs.replace(value, **changed) if changed else value


def medium_of(text: str, key: str | None, beside: Mapping[str, Any] | None) -> Medium | None:
    """Return the media that a string of a message is, None for text.

    Args:
        text: The string.
        key: Its name in the object that it is in.
        beside: That object.

    """
    if text.startswith(HELD):
        fields = held_fields(text)
        return None if fields is None else _referred(fields)
    if text.startswith("data:") and key not in _TEXT_KEYS:
        head, comma, data = text.partition(",")
        if not comma or not head.endswith(";base64"):
            return None
        media_type = head[len("data:") :].partition(";")[0]
        return _medium(data[:_HEAD].encode("ascii", "replace"), len(data), media_type)
    if key not in _DATA_KEYS or beside is None:
        return None
    types = (beside[name] for name in _TYPE_KEYS if isinstance(beside.get(name), str))
    typed: str | None = next(types, None)
    if typed is None:
        shown = sniffed(_decoded(text[:64].encode("ascii", "replace")) or b"")
        form = beside.get("format")
        typed = f"audio/{form}" if shown is None and isinstance(form, str) else shown
    if not typed or beside.get("type") == "text":
        return None
    media_type = typed.partition(";")[0].strip().lower()
    return _medium(text[:_HEAD].encode("ascii", "replace"), len(text), media_type)


def media_of(message: Message) -> list[tuple[Medium, str]]:
    """Return the media of a message with the strings that they are, in order."""
    found: list[tuple[Medium, str]] = []

    def note(medium: Medium, text: str) -> str:
        found.append((medium, text))
        return text

    with_media(message, note, lambda _: "")
    return found


def media_of_all(messages: Sequence[Message]) -> list[tuple[int, Medium, str]]:
    """Return the media of messages in order, each with its message's place and its string.

    Most messages are text, which takes no walk.
    """
    suspects = [
        at
        for at, message in enumerate(messages)
        if type(message.content) is not str
        or message.content.startswith(HELD)
        or message.tool_calls
        or message.tool_result is not None
        or message.extra
        or message.payload_extra
        or message.image_urls
        or message.audio_urls
        or message.video_urls
        or message.reasoning is not None
    ]
    if not may_hold_media([_values(messages[at]) for at in suspects]):
        return []
    return [(at, medium, text) for at in suspects for medium, text in media_of(messages[at])]


def string_of(text: str, raw: bytes) -> str:
    """Return the medium of a reference in memory."""
    form, media_type, *_ = (held_fields(text) or text).split(":")
    head = f"data:{media_type};base64," if form == "url" else ""
    return head + base64.b64encode(raw).decode()


# The size of an image


def dimensions(head: bytes) -> tuple[int, int]:
    """Return the width and height that an image's header says; zeros if it does not say.

    >>> dimensions(base64.b64decode(PIXEL))
    (1, 1)
    """
    width, height = 0, 0
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" and len(head) >= 24:
        width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    elif head.startswith(b"GIF8") and len(head) >= 10:
        width, height = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        width, height = _webp(head)
    elif head.startswith(b"\xff\xd8\xff"):
        width, height = _jpeg(head)
    return (width, height) if 0 < width < 10**6 and 0 < height < 10**6 else (0, 0)


def _webp(head: bytes) -> tuple[int, int]:
    if len(head) < 30:
        return 0, 0
    if head[12:16] == b"VP8X":
        width = int.from_bytes(head[24:27], "little")
        return width + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width = int.from_bytes(head[26:28], "little") & 0x3FFF
    return width, int.from_bytes(head[28:30], "little") & 0x3FFF


def _jpeg(head: bytes) -> tuple[int, int]:
    at = 2
    while at + 4 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC} and at + 9 <= len(head):
            height = int.from_bytes(head[at + 5 : at + 7], "big")
            return int.from_bytes(head[at + 7 : at + 9], "big"), height
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return 0, 0
