"""Settings of a Redis store, from its URL. Errors and representations never show the password."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from perdure.errors import ConfigError

SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")
SEVERAL: Final = re.compile(r"(redis|valkey)s?(\+|-)(sentinel|cluster)")
"""Schemes of other clients for Sentinels and clusters, which perdure does not support."""
_TLS: Final = frozenset({"rediss", "valkeys"})
_PORT: Final = 6379
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_OPTIONS: Final = (
    frozenset({"db", "prefix", "timeout", "connect_timeout", "wait", "history"}) | _TLS_OPTIONS
)


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Address and credentials of a server, and the prefix of perdure's keys."""

    host: str = "localhost"
    port: int = _PORT
    path: str = ""
    """A socket's path, instead of host and port."""
    db: int = 0
    username: str = ""
    password: str = ""
    tls: bool = False
    tls_files: dict[str, str] = {}
    prefix: str = "perdure"
    timeout: float = 5.0
    """Seconds that a reply may take."""
    connect_timeout: float = 5.0
    history: str = ""
    """The URL of a store for cold history."""
    wait: bool = True
    """Whether a save waits for the server's fsync, where a write does not imply it."""

    @property
    def location(self) -> str:
        """The server's address, without user and password."""
        if self.path:
            return f"unix://{self.path}?db={self.db}&prefix={self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{host}:{self.port}/{self.db}?prefix={self.prefix}"

    def __repr__(self) -> str:
        return f"Settings({self.location!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("location", self.location)]


def settings_from(url: str) -> RedisSettings:
    """Return the settings in a URL.

    Raises:
        ConfigError: The URL is invalid; the message never shows user or password.

    """
    scheme = url.partition(":")[0].lower()
    if SEVERAL.fullmatch(scheme) or _names_several_hosts(url):
        raise _invalid(
            "it names a Sentinel, a cluster or several hosts, and perdure talks to one primary",
            "use redis://host:6379/0 with the primary, or with an address that always leads to it "
            "(a proxy, or a DNS name that a failover moves); to spread over servers use "
            "PostgreSQL or S3",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _invalid("its host or port cannot be read", "use redis://host:6379/0") from None
    if parts.scheme not in SCHEMES:
        raise _invalid("its scheme is unknown", f"use one of {', '.join(SCHEMES)}")
    if "@" in parts.path + parts.query + parts.fragment or parts.fragment:
        reason = "a reserved character in its user, password or path splits it"
        raise _invalid(reason, "write @ # / ? : there as %40 %23 %2F %3F %3A")
    options = _options(parts.query)
    unix = parts.scheme == "unix"
    path = unquote(parts.path)
    if unix and (parts.hostname or not path.startswith("/")):
        raise _invalid("a socket needs an absolute path", "use unix:///run/valkey.sock?db=0")
    if not unix and not parts.hostname:
        raise _invalid("it names no host", "use redis://localhost:6379/0")
    return RedisSettings(
        host=parts.hostname or "",
        port=port or _PORT,
        path=path if unix else "",
        db=_number("db", options.get("db") or ("" if unix else path.strip("/")) or "0"),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme in _TLS,
        tls_files={name: value for name, value in options.items() if name in _TLS_OPTIONS},
        prefix=_prefix(options.get("prefix", "perdure")),
        timeout=_seconds("timeout", options.get("timeout", "5")),
        connect_timeout=_seconds("connect_timeout", options.get("connect_timeout", "5")),
        history=options.get("history", ""),
        wait=_yes_or_no("wait", options.get("wait", "yes")),
    )


def _names_several_hosts(url: str) -> bool:
    """Return whether the URL lists several hosts, after any user and password."""
    place = url.partition("://")[2].partition("?")[0].rpartition("@")[2]
    return "," in place.partition("/")[0] and not url.startswith("unix:")


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise _invalid(
                f"it has an unknown option {name!r}", f"known: {', '.join(sorted(_OPTIONS))}"
            )
    return options


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise _invalid(f"{name}={text!r} is not a number", "use a database's number, such as 0")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _invalid(f"invalid {name}={text!r}", "use seconds, such as 5")
    return seconds


def _prefix(text: str) -> str:
    if not _PREFIX.match(text):
        raise _invalid(f"invalid prefix={text!r}", "use up to 64 of letters, digits, _ . : -")
    return text


def _yes_or_no(name: str, text: str) -> bool:
    if text not in {"yes", "no"}:
        raise _invalid(f"invalid {name}={text!r}", "use yes or no")
    return text == "yes"


def _invalid(reason: str, cure: str) -> ConfigError:
    return ConfigError(f"the URL of a Redis store is invalid: {reason}: {cure}", option="url")
