"""What the server is set up to do: whether it keeps what it says, and how surely."""

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
_KEEPS = "noeviction"
_PAUSES = "no-appendfsync-on-rewrite"
_POLICY: Final = "maxmemory-policy"
_ASKED = (_POLICY, "appendonly", "appendfsync", "save", _PAUSES)
_POLL = 0.05
_SIZE: Final = re.compile(r"cluster_size:(\d+)")


async def examine(link: RedisLink) -> str:
    """Return what OK means on this server, and have each write wait for the disk where it can.

    Raises:
        ConfigError: The server may throw data away when its memory is full, or is one of several
            primaries of a cluster.

    """
    await _require_one_primary(link)
    said = await _settings(link)
    policy = await _policy(link, said)
    if policy not in {None, _KEEPS}:
        raise ConfigError(_evicts(link, policy), option="maxmemory-policy", value=policy)
    if policy is None:
        log.warning("whether the server evicts keys is unknown", extra={"store": link.location})
    wait = False
    if link.settings.wait and said.get("appendonly") == "yes":
        wait = said.get("appendfsync") == "everysec" and await _has_waitaof(link)
    link.waits = wait
    return durability_of(said, waits=wait)


async def _require_one_primary(link: RedisLink) -> None:
    """Refuse a cluster that keeps sessions on several servers: redirections are not followed."""
    if link.mode != "cluster":
        return
    (reply,) = await link.ask([RedisCall(b"CLUSTER INFO")])
    found = None if isinstance(reply, BaseException) else _SIZE.search(_text(reply))
    if found is not None and int(found[1]) > 1:
        message = (
            f"{link.location} is a node of a cluster with {found[1]} primaries: perdure keeps a "
            "store on one primary and follows no redirections. Name a server without "
            "cluster-enabled, or a cluster of one primary; to spread over more use PostgreSQL or S3"
        )
        raise ConfigError(message, option="url")


def _text(reply: Any) -> str:
    if isinstance(reply, dict):
        return "".join(f"{_text(name)}:{_text(one)}\n" for name, one in reply.items())
    return reply.decode() if isinstance(reply, bytes) else str(reply)


async def warnings(link: RedisLink) -> tuple[str, ...]:
    """Return what is wrong with how the server is set up by now, that was well at first."""
    policy = await _policy(link, await _settings(link, (_POLICY,)))
    return () if policy in {None, _KEEPS} else (_evicts(link, policy),)


async def _policy(link: RedisLink, said: Mapping[str, str]) -> str | None:
    return said.get(_POLICY) or (await _info(link, "memory")).get("maxmemory_policy")


def _evicts(link: RedisLink, policy: str | None) -> str:
    return (
        f"the server at {link.location} may throw sessions away when its memory is full "
        f"(maxmemory-policy {policy}): set maxmemory-policy noeviction in its configuration, or "
        "with CONFIG SET"
    )


def durability_of(said: Mapping[str, str], *, waits: bool) -> str:
    """Say what OK means, from those of the server's settings that it tells.

    >>> durability_of({"appendonly": "yes", "appendfsync": "everysec"}, waits=False)
    'fsync every second'
    """
    appends, syncs = said.get("appendonly"), said.get("appendfsync")
    if appends is None:
        return UNKNOWN
    if appends != "yes":
        return "memory, with snapshots" if said.get("save") else "memory"
    if waits:
        return "fsync"
    if syncs == "always":
        return "fsync" if said.get(_PAUSES) != "yes" else "fsync, but not during a rewrite"
    if syncs == "everysec":
        return "fsync every second"
    return UNKNOWN if syncs is None else "written, synced by the system"


async def _settings(link: RedisLink, names: Sequence[str] = _ASKED) -> dict[str, str]:
    """Return the settings that the server tells; nothing where CONFIG is forbidden."""
    replies = await link.ask([RedisCall(b"CONFIG GET", name) for name in names])
    said: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, dict):
            said.update({name.decode(): value.decode() for name, value in reply.items()})
    return said


async def _info(link: RedisLink, section: str) -> dict[str, str]:
    """Return a section of INFO; nothing where it is forbidden."""
    (reply,) = await link.ask([RedisCall(b"INFO", section)])
    if isinstance(reply, BaseException):
        return {}
    pairs = (line.partition(":") for line in bytes(reply).decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


async def _has_waitaof(link: RedisLink) -> bool:
    (reply,) = await link.ask([RedisCall(b"WAITAOF", 0, 0, 0)])
    return not isinstance(reply, BaseException)


async def scrub(link: RedisLink) -> None:
    """Have the server write its files anew, without what was removed, and wait for it.

    Raises:
        StoreUnavailableError: The server would not, or could not.

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
    (reply,) = await link.ask([begin])
    if isinstance(reply, BaseException) and "progress" not in str(reply):
        message = (
            f"the server at {link.location} would not write its files anew ({reply}): run "
            f"{begin.name.decode()} there, so that what was removed leaves its disk"
        )
        raise StoreUnavailableError(message, location=link.location, sent=False)
    while True:
        told = await _info(link, "persistence")
        if not any(told.get(busy + what) == "1" for what in ("in_progress", "scheduled")):
            break
        await anyio.sleep(_POLL)
    if told.get(last) == "err":
        message = (
            f"the server at {link.location} failed to write its files anew: see its log and its "
            "disk; what was removed may still be found there"
        )
        raise StoreUnavailableError(message, location=link.location, sent=False)
