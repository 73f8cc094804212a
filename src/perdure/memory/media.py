"""The budget for media in a working context: tokens, not bytes of text.

Images, documents, audio and video are counted as the tokens that they take of a model's window.
The newest stay; where the budget is spent, the oldest leave a note. They leave some at a time, so
that a provider's cache of the request's beginning holds for a while. Pure.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Final

import msgspec

from perdure.errors import InvalidArgumentError
from perdure.records.media import LOST, Medium, media_of_all, string_of, with_media
from perdure.records.messages import Message

MediaTokens = Callable[[Medium], int]
"""Returns how many tokens an image, or other media, takes."""

MIB: Final = 1024 * 1024
BUDGET: Final = 40_000
"""Tokens of media that a context has by default: about 25 images."""
HELD_BYTES: Final = 48 * MIB
"""Bytes of media that one session holds in memory, and shows, at most."""
STEP: Final = 0.25
"""The share of the budget that leaves at a time."""
SPENT: Final = "left out: the budget for media is spent"
TOO_MUCH: Final = "left out: the provider takes no more of it"

log: Final = logging.getLogger("perdure")
_MOST: Final = 10**12
"""Tokens that one takes at most: a share of the budget is a float."""
_FAILED: Final[deque[MediaTokens]] = deque(maxlen=16)
"""Functions that have returned no number: they are not asked again."""
_AROUND: Final = 128
"""Bytes of a request around the base64 of one of its media, at most."""
_UNKNOWN_IMAGE: Final = 1_600
"""Tokens of an image that does not say how large it is."""
_BYTES_A_PAGE: Final = 75_000
_PAGE: Final = {"anthropic": 3_000, "openai": 1_500, "gemini": 258}
_AUDIO: Final = {"anthropic": 32, "openai": 10, "gemini": 32}
"""Tokens of a second."""
_VIDEO: Final = 300
_AUDIO_RATE: Final = 16_000
_WAV_RATE: Final = 32_000
_VIDEO_RATE: Final = 250_000
"""Bytes of a second, where nothing says how long it is."""


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits of a provider for media in one request; bytes are those of base64."""

    count: int
    bytes: int
    image: int
    """Bytes of one image."""

    def share(self, size: int) -> float:
        """Return how much of a request media of so many bytes take."""
        return max(size / self.bytes, 1 / self.count)


LIMITS: Final = {
    "anthropic": RequestLimits(count=100, bytes=28 * MIB, image=5 * MIB),
    "gemini": RequestLimits(count=3_000, bytes=18 * MIB, image=18 * MIB),
    "openai": RequestLimits(count=500, bytes=46 * MIB, image=46 * MIB),
}


def estimated(medium: Medium, provider: str | None = None) -> int:
    """Return about how many tokens media take of a provider's window; None for the most of any.

    >>> estimated(Medium("image/png", 300_000, 1280, 800), "anthropic")
    1366
    >>> estimated(Medium("image/png", 300_000, 1280, 800), "openai")
    1105
    >>> estimated(Medium("image/png", 300_000, 1280, 800), "gemini")
    1548
    """
    if provider is None:
        return max(estimated(medium, each) for each in _PAGE)
    provider = "openai" if provider not in _PAGE else provider
    if medium.kind == "image":
        return _image(medium, provider)
    if medium.kind == "document":
        return ceil(medium.bytes / _BYTES_A_PAGE) * _PAGE[provider]
    if medium.kind == "audio":
        rate = _WAV_RATE if medium.type.endswith("wav") else _AUDIO_RATE
        return ceil(medium.bytes / rate * _AUDIO[provider])
    return ceil(medium.bytes / _VIDEO_RATE * _VIDEO)


def _image(medium: Medium, provider: str) -> int:
    width, height = medium.width, medium.height
    if not width or not height:
        return _UNKNOWN_IMAGE
    if provider == "anthropic":  # it is scaled to 1,568 pixels at its longer side
        scale = min(1.0, 1568 / max(width, height))
        return min(ceil(width * scale * height * scale / 750), 1_600)
    if provider == "openai":  # within 2,048 pixels, then 768 at its shorter side; tiles of 512
        scale = min(1.0, 2048 / max(width, height))
        scale = min(scale, 768 / min(width, height))
        tiles = ceil(round(width * scale) / 512) * ceil(round(height * scale) / 512)
        return 85 + 170 * tiles
    if max(width, height) <= 384:
        return 258
    side = min(max(256, int(min(width, height) / 1.5)), 768)
    return 258 * ceil(width / side) * ceil(height / side)


class MediaBudget(msgspec.Struct, frozen=True):
    """Share of a context that media may take.

    Args:
        tokens: Of all of them together.
        each: How many one takes: a number for each, or a function; None for an estimate by the
            provider.

    """

    tokens: int = BUDGET
    each: int | MediaTokens | None = None

    def count(self, medium: Medium, provider: str | None = None) -> int:
        """Return how many tokens media take."""
        given = self._given(medium)
        return estimated(medium, provider) if given is None else given

    def least(self, medium: Medium) -> int:
        """Return the fewest tokens that any provider counts."""
        given = self._given(medium)
        if given is not None:
            return given
        return min(estimated(medium, provider) for provider in _PAGE)

    def _given(self, medium: Medium) -> int | None:
        """Return what was said that media take; None for nothing, or nothing that counts."""
        each = self.each
        if each is None:
            return None
        if isinstance(each, int):
            return min(each, _MOST)
        if any(each is one for one in _FAILED):
            return None  # what is held, and what is shown, are counted alike
        error: Exception | None = None
        given: object = None
        try:
            given = each(medium)
        except Exception as raised:  # noqa: BLE001  # the application's own
            error = raised
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return min(given, _MOST)
        _FAILED.append(each)
        log.warning(
            "Limits(media_tokens=…) %s for %s, and perdure's own estimate counts from now on: "
            "return a whole number from 0",
            f"returned {given!r}" if error is None else "raised an error",
            medium.type,
            exc_info=error,
        )
        return None


def require_media_tokens(given: object) -> None:
    """Raise InvalidArgumentError unless it says how many tokens media take."""
    if given is None or callable(given) or (type(given) is int and given >= 0):
        return
    raise InvalidArgumentError(
        f"limits: invalid media_tokens={given!r}: give a number, a function of a Medium, or None",
        option="media_tokens",
        value=given,
    )


def kept_of(costs: Sequence[float]) -> int:
    """Return the place of the first that stays, of shares of a budget in order, oldest first.

    What leaves is a multiple of `STEP` of the budget, so that what stays is the same for a while.

    >>> kept_of([0.3, 0.3, 0.3]), kept_of([0.3, 0.3, 0.3, 0.3])
    (0, 1)
    """
    excess = sum(costs) - 1.0
    if excess <= 1e-9:
        return 0
    leaving, at = ceil(excess / STEP - 1e-9) * STEP, 0
    while leaving > 1e-9 and at < len(costs):
        leaving -= costs[at]
        at += 1
    return at


class FittedMedia(msgspec.Struct, frozen=True):
    """Messages with the media that fit."""

    messages: list[Message]
    had_media: bool = True
    """False if there were none to fit."""
    left_out: tuple[Medium, ...] = ()
    """Those that the budget has no room for."""
    lost: tuple[Medium, ...] = ()
    """Those that should be here, and whose blobs are gone."""


def fitted(
    messages: Sequence[Message],
    budget: MediaBudget,
    blobs: Mapping[str, bytes],
    *,
    provider: str | None = None,
) -> FittedMedia:
    """Return messages whose media are in place as far as the budget allows; else notes.

    The media of the newest message that has some stay, even if they alone are more.

    Args:
        messages: Oldest first.
        budget: How much.
        blobs: The media that are in blobs, by name.
        provider: Who reads them.

    """
    found = [(at, medium) for at, medium, _ in media_of_all(messages)]
    if not found:
        return FittedMedia(list(messages), had_media=False)
    room, limits = max(budget.tokens, 1), LIMITS.get(provider or "")

    def cost(medium: Medium) -> float:
        share = max(budget.count(medium, provider) / room, medium.bytes / HELD_BYTES)
        return (
            share if limits is None else max(share, limits.share(medium.bytes * 4 // 3 + _AROUND))
        )

    first = kept_of([cost(medium) for _, medium in found])
    newest = found[-1][0]
    first = min(first, next(place for place, (at, _) in enumerate(found) if at == newest))
    lost: list[Medium] = []
    place, size = -1, 0

    def decide(medium: Medium, text: str) -> str | None:
        nonlocal place, size
        place += 1
        if place < first:
            return None
        if not medium.name:
            return text
        raw = blobs.get(medium.name)
        if raw is None or size + len(raw) > HELD_BYTES:
            lost.append(medium)
            return None
        size += len(raw)
        return string_of(text, raw)

    def why(_: Medium) -> str:
        return SPENT if place < first else LOST

    with_some = {at for at, _ in found}
    shown = [
        with_media(message, decide, why) if at in with_some else message
        for at, message in enumerate(messages)
    ]
    left_out = tuple(medium for _, medium in found[:first])
    return FittedMedia(shown, left_out=left_out, lost=tuple(lost))
