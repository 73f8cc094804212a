"""Server settings that decide on durability: eviction, persistence and fsync."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio

from perdure.errors import ConfigError, StoreUnavailableError
from perdure.stores.redis.connection import RedisCall, RedisLink

log: logging.Logger = logging.getLogger("perdure")

UNKNOWN: Final = "unknown"
_NO_EVICTION = "noeviction"
_NO_SYNC_ON_REWRITE = "no-appendfsync-on-rewrite"
_POLICY: Final = "maxmemory-policy"
_SETTINGS = (_POLICY, "appendonly", "appendfsync", "save", _NO_SYNC_ON_REWRITE)
_POLL_SECONDS = 0.05
_CLUSTER_SIZE: Final = re.compile(r"cluster_size:(\d+)")


async def inspect_durability(link: RedisLink) -> str:
    """Return the server's durability; make writes await its fsync where that is supported.

    Raises:
        ConfigError: The server may evict data when its memory is full, or is one of several
            primaries of a cluster.

    """
    await _require_one_primary(link)
    settings = await _settings(link)
    policy = await _policy(link, settings)
    if policy not in {None, _NO_EVICTION}:
        raise ConfigError(_eviction_message(link, policy), option="maxmemory-policy", value=policy)
    if policy is None:
        log.warning("whether the server evicts keys is unknown", extra={"store": link.location})
    wait = False
    if link.settings.wait and settings.get("appendonly") == "yes":
        wait = settings.get("appendfsync") == "everysec" and await _has_waitaof(link)
    link.waits = wait
    return durability_name(settings, waits=wait)


async def _require_one_primary(link: RedisLink) -> None:
    """Refuse a cluster of several primaries: perdure does not follow redirections."""
    if link.mode != "cluster":
        return
    (reply,) = await link.request([RedisCall(b"CLUSTER INFO")])
    match = None if isinstance(reply, BaseException) else _CLUSTER_SIZE.search(_text(reply))
    if match is not None and int(match[1]) > 1:
        message = (
            f"{link.location} is a node of a cluster with {match[1]} primaries: perdure keeps a "
            "store on one primary and does not follow redirections. Name a server without "
            "cluster-enabled, or a cluster of one primary; to spread over more use PostgreSQL or S3"
        )
        raise ConfigError(message, option="url")


def _text(reply: Any) -> str:
    if isinstance(reply, dict):
        return "".join(f"{_text(name)}:{_text(value)}\n" for name, value in reply.items())
    return reply.decode() if isinstance(reply, bytes) else str(reply)


async def warnings(link: RedisLink) -> tuple[str, ...]:
    """Return warnings about settings that were changed after the store was opened."""
    policy = await _policy(link, await _settings(link, (_POLICY,)))
    return () if policy in {None, _NO_EVICTION} else (_eviction_message(link, policy),)


async def _policy(link: RedisLink, settings: Mapping[str, str]) -> str | None:
    return settings.get(_POLICY) or (await _info(link, "memory")).get("maxmemory_policy")


def _eviction_message(link: RedisLink, policy: str | None) -> str:
    return (
        f"the server at {link.location} may evict sessions when its memory is full "
        f"(maxmemory-policy {policy}): set maxmemory-policy noeviction in its configuration, or "
        "with CONFIG SET"
    )


def durability_name(settings: Mapping[str, str], *, waits: bool) -> str:
    """Return the durability of an acknowledged write, from the known settings.

    >>> durability_name({"appendonly": "yes", "appendfsync": "everysec"}, waits=False)
    'fsync every second'
    """
    appends, syncs = settings.get("appendonly"), settings.get("appendfsync")
    if appends is None:
        return UNKNOWN
    if appends != "yes":
        return "memory, with snapshots" if settings.get("save") else "memory"
    if waits:
        return "fsync"
    if syncs == "always":
        return (
            "fsync"
            if settings.get(_NO_SYNC_ON_REWRITE) != "yes"
            else "fsync, but not during a rewrite"
        )
    if syncs == "everysec":
        return "fsync every second"
    return UNKNOWN if syncs is None else "written, synced by the system"


async def _settings(link: RedisLink, names: Sequence[str] = _SETTINGS) -> dict[str, str]:
    """Return the server's settings; empty if CONFIG is forbidden."""
    replies = await link.request([RedisCall(b"CONFIG GET", name) for name in names])
    settings: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, dict):
            settings.update({name.decode(): value.decode() for name, value in reply.items()})
    return settings


async def _info(link: RedisLink, section: str) -> dict[str, str]:
    """Return a section of INFO; empty if it is forbidden."""
    (reply,) = await link.request([RedisCall(b"INFO", section)])
    if isinstance(reply, BaseException):
        return {}
    pairs = (line.partition(":") for line in bytes(reply).decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


async def _has_waitaof(link: RedisLink) -> bool:
    (reply,) = await link.request([RedisCall(b"WAITAOF", 0, 0, 0)])
    return not isinstance(reply, BaseException)


async def scrub(link: RedisLink) -> None:
    """Have the server rewrite its files without the removed data, and wait until it has.

    Raises:
        StoreUnavailableError: The server refuses, or fails.

    """
    aof = (await _info(link, "persistence")).get("aof_enabled") == "1"
    if aof:
        begin, busy, last = RedisCall(b"BGREWRITEAOF"), "aof_rewrite_", "aof_last_bgrewrite_status"
    else:
        begin, busy, last = (
            RedisCall(b"BGSAVE", b"SCHEDULE"),
            "rdb_bgsave_",
            "rdb_last_bgsave_status",
        )
    (reply,) = await link.request([begin])
    if isinstance(reply, BaseException) and "progress" not in str(reply):
        message = (
            f"the server at {link.location} refused to rewrite its files ({reply}): run "
            f"{begin.name.decode()} there, so that removed data leaves its disk"
        )
        raise StoreUnavailableError(message, location=link.location, sent=False)
    while True:
        info = await _info(link, "persistence")
        if not any(info.get(busy + what) == "1" for what in ("in_progress", "scheduled")):
            break
        await anyio.sleep(_POLL_SECONDS)
    if info.get(last) == "err":
        message = (
            f"the server at {link.location} failed to rewrite its files: see its log and its "
            "disk; removed data may still be on it"
        )
        raise StoreUnavailableError(message, location=link.location, sent=False)
