"""The parts of a message's content, whichever provider's shape they have.

Content is text, or a list of parts as some provider shapes them. Here each part is read into
what it is: text, or media. A part of no shape that is known here stays as it is, since the
user knows what it is for.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec

from perdure.providers.context_fit import ContextTarget, clean
from perdure.providers.issued import STAMP, marks, stamp_of
from perdure.providers.request_rules import IMAGES
from perdure.records.messages import Extra, Message

Kind = Literal["image", "audio", "video", "document"]

_PROPER: Final = {"image/jpg": "image/jpeg", "audio/mp3": "audio/mpeg", "audio/x-wav": "audio/wav"}


_EMBEDDED: Final = re.compile(r"data:[a-z]+/[A-Za-z0-9.+-]+;base64,")


class Text(msgspec.Struct, frozen=True):
    """Words."""

    text: str


class Media(msgspec.Struct, frozen=True):
    """Something to look at or to listen to: at a URL, or as data."""

    kind: Kind
    url: str | None = None
    data: str | None = None
    """Base64."""
    media_type: str | None = None
    name: str | None = None

    @property
    def data_url(self) -> str:
        """The data as a URL."""
        return f"data:{self.type};base64,{self.data}"

    @property
    def type(self) -> str:
        """The media type by its proper name, guessed where it is not said."""
        declared = (self.media_type or "").partition(";")[0].strip().lower()
        return _PROPER.get(declared, declared) or _guessed(self.kind, self.url or self.name or "")


class Unknown(msgspec.Struct, frozen=True):
    """A part that perdure does not know."""

    part: dict[str, Any]


Part = Text | Media | Unknown


def parts_of(message: Message) -> Iterator[tuple[Part, Any]]:
    """Return the parts of a message's content, then its media; each with what it was read from."""
    content = message.content
    if isinstance(content, str):
        yield Text(content), content
    for part in content if isinstance(content, list) else ():
        yield read_part(part), part
    kinds: tuple[tuple[Kind, tuple[str, ...]], ...] = (
        ("image", message.image_urls),
        ("audio", message.audio_urls),
        ("video", message.video_urls),
    )
    for kind, urls in kinds:
        for url in urls:
            yield media_at(url, kind), None


def media_at(url: str, kind: Kind) -> Media:
    """Return what is at a URL; a ``data:`` URL holds it itself.

    >>> media_at("data:image/png;base64,AAAA", "image").media_type
    'image/png'
    """
    if url.startswith("data:"):
        head, _, data = url[len("data:") :].partition(",")
        media_type, *parameters = head.split(";")
        if "base64" not in parameters:
            data = base64.b64encode(unquote_to_bytes(data)).decode()
        return Media(_kind(media_type, kind), data=data, media_type=media_type or None)
    return Media(kind, url=url)


def image_url(media: Media) -> str | None:
    """Return where OpenAI finds an image: its address, or itself; None if it cannot take it."""
    if media.kind != "image":
        return None
    if media.url is not None:
        return media.url if media.url.startswith(("http://", "https://")) else None
    return media.data_url if media.data and media.type in IMAGES else None


def note(media: Media) -> str:
    """Return what a model that cannot take it reads in its place."""
    if media.url is not None:
        return f"[{media.kind}: {media.url}]"
    named = f" {media.name}" if media.name else ""
    return f"[{media.kind}{named} ({media.type}), which cannot be shown here]"


def plain(part: Part) -> str:
    """Return a part as words, for a place where only words may stand."""
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Media):
        return note(part)
    return f"[{part.part.get('type', 'part')}, which cannot be shown here]"


def content_of(message: Message, shaped: Callable[[Part, Any], dict[str, Any]]) -> Any:
    """Return what a user or the instructions say, as OpenAI takes it: text, or parts."""
    has_media = message.image_urls or message.audio_urls or message.video_urls
    if isinstance(message.content, str) and not has_media:
        return clean(message.content)
    if message.role == "system":
        return clean("\n\n".join(plain(part) for part, _ in parts_of(message)))
    parts = [shaped(part, source) for part, source in parts_of(message)]
    return [part for part in parts if part.get("text") != ""] or ""


def shown(result: Any) -> list[tuple[Part, Any]] | None:
    """Return a tool's result as parts, if it is a list of them with something to look at.

    One such part alone, or a ``data:`` URL, will do too.
    """
    if isinstance(result, str):
        result = {"type": "image_url", "image_url": result} if _EMBEDDED.match(result) else None
    if isinstance(result, Mapping):
        result = None if _OF_MEDIA.isdisjoint(result) else [result]
    if not isinstance(result, list) or not all(isinstance(block, Mapping) for block in result):
        return None
    read = [(read_part(block), block) for block in result]
    if any(isinstance(part, Unknown) for part, _ in read):
        return None
    return read if any(isinstance(part, Media) for part, _ in read) else None


_OF_MEDIA: Final = frozenset({"type", "inlineData", "inline_data", "fileData", "file_data"})
"""Fields of which a part has one, if it is something to look at."""


def words_of(message: Message) -> str:
    """Return an answer as words: media as notes, and nothing for white space alone."""
    words = "\n\n".join(filter(None, (plain(part) for part, _ in parts_of(message))))
    return words if words.strip() else ""


def read_part(part: Any) -> Part:
    """Return what a content part is."""
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, Mapping):
        return Text(msgspec.json.encode(part, enc_hook=str).decode())
    kind = part.get("type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    known = _gemini(part) if read is None else read(part)
    return Unknown(dict(part)) if known is None else known


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _words(field: str, part: Mapping[str, Any]) -> Part | None:
    text = part.get(field)
    return Text(text) if isinstance(text, str) else None


def _image_url(part: Mapping[str, Any]) -> Part | None:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    return media_at(url, "image") if isinstance(url, str) else None


def _input_audio(part: Mapping[str, Any]) -> Part | None:
    audio = part.get("input_audio")
    if not isinstance(audio, Mapping) or not isinstance(audio.get("data"), str):
        return None
    form = audio.get("format")
    media_type = f"audio/{form}" if isinstance(form, str) else None
    return Media("audio", data=audio["data"], media_type=media_type)


def _file(part: Mapping[str, Any]) -> Part | None:
    inner = part.get("file")
    file = inner if isinstance(inner, Mapping) else part
    name = _str(file.get("filename"))
    for field in ("file_data", "file_url"):
        url = file.get(field)
        if isinstance(url, str):
            return msgspec.structs.replace(media_at(url, "document"), name=name)
    return None


def _source(part: Mapping[str, Any]) -> Part | None:
    """Read an image or document of Anthropic's, or media of an MCP server's."""
    kind: Kind = part["type"]
    source = part.get("source", part)
    if not isinstance(source, Mapping):
        return None
    data, url = source.get("data"), source.get("url")
    media_type = _str(source.get("media_type", source.get("mimeType")))
    name = _str(part.get("title"))
    if isinstance(url, str):
        return msgspec.structs.replace(media_at(url, kind), name=name)
    if not isinstance(data, str):
        return None
    if source.get("type") == "text":
        return Text(data)
    return Media(kind, data=data, media_type=media_type, name=name)


def _gemini(part: Mapping[str, Any]) -> Part | None:
    if isinstance(part.get("text"), str) and "type" not in part:
        return Text(part["text"])
    blob = part.get("inlineData", part.get("inline_data"))
    if isinstance(blob, Mapping) and isinstance(blob.get("data"), str):
        media_type = _str(blob.get("mimeType", blob.get("mime_type")))
        return Media(_kind(media_type or "", "document"), data=blob["data"], media_type=media_type)
    file = part.get("fileData", part.get("file_data"))
    if isinstance(file, Mapping):
        url = file.get("fileUri", file.get("file_uri"))
        media_type = _str(file.get("mimeType", file.get("mime_type")))
        if isinstance(url, str):
            return Media(_kind(media_type or "", "document"), url=url, media_type=media_type)
    return None


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], Part | None]]] = {
    "text": partial(_words, "text"),
    "input_text": partial(_words, "text"),
    "output_text": partial(_words, "text"),
    "refusal": partial(_words, "refusal"),
    "image_url": _image_url,
    "input_image": _image_url,
    "computer_screenshot": _image_url,
    "input_audio": _input_audio,
    "file": _file,
    "input_file": _file,
    "image": _source,
    "document": _source,
    "audio": _source,
    "video": _source,
}

_OF_ENDING: Final = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "pdf": "application/pdf",
    "txt": "text/plain",
}
_USUAL: Final = {
    "image": "image/jpeg",
    "audio": "audio/mpeg",
    "video": "video/mp4",
    "document": "application/pdf",
}


def _guessed(kind: Kind, name: str) -> str:
    ending = name.partition("?")[0].rsplit(".", 1)[-1].lower()
    media_type = _OF_ENDING.get(ending, "")
    return media_type if media_type and _kind(media_type, kind) == kind else _USUAL[kind]


def _kind(media_type: str, otherwise: Kind) -> Kind:
    family = media_type.partition("/")[0]
    if family in {"image", "audio", "video"}:
        return family  # type: ignore[return-value]  # one of three
    return "document" if media_type else otherwise


# Reasoning taken out of a message for good


def without_reasoning(message: Message, target: ContextTarget) -> Message:
    """Return a message without what its reader may not get; the same object if it may get all.

    Reasoning, signatures and unknown fields go; what was said, the calls, and who said it stay.
    """
    stamp = stamp_of(message)
    if stamp is None or target.own(stamp) is not None:
        return message
    bare = msgspec.structs.replace(stamp, items=(), reasoning_field=None)
    extra: Extra = {**marks(message.extra), STAMP: msgspec.Raw(msgspec.json.encode(bare))}
    stripped = msgspec.structs.replace(
        message,
        reasoning=None,
        extra=extra,
        tool_calls=tuple(
            msgspec.structs.replace(call, extra=marks(call.extra)) for call in message.tool_calls
        ),
    )
    return message if stripped == message else stripped
