"""Documents and manifests: one script writes them and one reads, so readers see no mixture."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import final

import msgspec

from perdure.errors import UnsupportedVersionError
from perdure.records import records
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Manifest, matched
from perdure.store import Documents
from perdure.stores.redis.connection import RedisLink, script
from perdure.stores.redis.entries import damage_error
from perdure.stores.redis.layout import KeyNames
from perdure.stores.redis.log import lease_lost

log: logging.Logger = logging.getLogger("perdure")


class ListedFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a session that listings show, stored apart so that listings read no manifests."""

    owner: str | None = None
    title: str | None = None
    tags: tuple[str, ...] = ()
    turns: int = 0


class _Format(msgspec.Struct):
    format: int


@final
class RedisDocuments:
    """The documents of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames) -> None:
        self._link = link
        self._names = names

    async def read(self, key: SessionKey, names: Collection[str] | None) -> Documents:
        keys = self._names.session_keys(key)
        selected = () if names is None else tuple(names) or ("",)
        ((encoded, *parts),) = await self._link.send(
            [_READ((keys.session, keys.documents), *selected)]
        )
        documents = dict(zip(map(bytes.decode, parts[::2]), parts[1::2], strict=True))
        manifest = None if encoded is None else _manifest_of(key, encoded)
        if manifest is None:  # lost or damaged, so no document can be verified
            return Documents(damaged=tuple(sorted(documents)), remains=documents)
        return matched(manifest, documents, names)

    async def write(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one step."""
        keys = self._names.session_keys(key)
        about = manifest.about
        shown = ListedFields(
            owner=about.owner,
            title=about.title,
            tags=about.tags,
            turns=manifest.counters.get("turns", 0),
        )
        pairs = [part for pair in documents.items() for part in pair]
        call = _FOLD(
            (keys.session, keys.documents),
            manifest.epoch,
            records.seal(msgspec.json.encode(manifest)),
            msgspec.json.encode(shown),
            b"%.3f" % time.time(),
            len(documents),
            *pairs,
            *manifest.documents,
        )
        (reply,) = await self._link.write([call])
        if reply != 0:
            raise lease_lost(key, manifest.epoch, reply[1], deleted=bool(reply[2]))


def _manifest_of(key: SessionKey, encoded: bytes) -> Manifest | None:
    """Return a manifest; None for a damaged one, which counts as lost."""
    data = records.open_sealed(encoded)
    try:
        number = None if data is None else decoder_of(_Format).decode(data)
        if data is None or number is None:
            log.warning("the manifest of session %s is damaged", key, extra={"session": str(key)})
            return None
        if number.format > FORMAT:
            message = (
                f"the manifest of {key} has format {number.format}, this release reads up to "
                f"{FORMAT}: use a newer release of perdure"
            )
            raise UnsupportedVersionError(message, key=str(key), format=number.format)
        manifest = decoder_of(Manifest).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        log.warning("the manifest of session %s cannot be read", key, extra={"session": str(key)})
        return None
    if manifest.key != key:
        raise damage_error(key, "the manifest", f"it is the one of {manifest.key}")
    return manifest


_READ = script("read")
_FOLD = script("fold")
