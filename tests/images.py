"""Images to say and to return: files as programs make them, and the parts that hold them."""

from __future__ import annotations

import base64
import random
from typing import Any


def png(size: int, number: int = 0, *, width: int = 1280, height: int = 800) -> bytes:
    """Return a file of about so many bytes that begins as an image does."""
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return head + random.Random(number).randbytes(size)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(data: bytes) -> dict[str, Any]:
    """Return an image as Anthropic shapes it."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(data)}
    return {"type": "image", "source": source}


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def strings(value: Any) -> list[tuple[str, str]]:
    """Return all strings of a request, each with the name of its field."""
    found: list[tuple[str, str]] = []
    if isinstance(value, dict):
        for name, inner in value.items():
            found += [(name, inner)] if isinstance(inner, str) else strings(inner)
    elif isinstance(value, list):
        for inner in value:
            found += [("", inner)] if isinstance(inner, str) else strings(inner)
    return found


def shown(request: Any) -> list[bytes]:
    """Return the images that a request shows, in order."""
    found = []
    for name, text in strings(request):
        if name in {"data", "url", "image_url"} and len(text) > 500:
            found.append(base64.b64decode(text.rpartition(",")[2]))
    return found


def words(request: Any) -> str:
    """Return all that a request says in words."""
    said = [text for name, text in strings(request) if name not in {"data", "url", "image_url"}]
    return "\n".join(said)
