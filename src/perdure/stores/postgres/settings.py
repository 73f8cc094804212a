"""Settings from a ``postgresql:`` URL. Pure, and without the driver.

perdure's own parameters (``schema``, ``connections``, ``timeout``) are removed; all others are
passed to libpq unchanged. The location that may be shown is built here from user, hosts, database
and schema only, instead of by masking secrets.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

import msgspec

from perdure.errors import ConfigError

SCHEMA = "perdure"
CONNECTIONS = 6
_MAX_CONNECTIONS = 100
TIMEOUT = 15.0
_MIN_TIMEOUT = 0.1
_MAX_TIMEOUT = 600.0
_OWN = frozenset({"schema", "connections", "timeout"})
_SECRET = frozenset({"password", "sslpassword", "oauth_client_secret", "sslkey"})
_PORT = re.compile(r"\A(?:\[[^\]]*\]|[^:\[\]]*):")
"""The part before a port: a name, or an address in brackets."""
_NAME_BYTES = 63
"""PostgreSQL truncates longer names silently."""


class PostgresSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to connect."""

    conninfo: str
    """For libpq; may hold a password."""
    schema: str
    connections: int
    timeout: float
    """Seconds that a reply may take."""
    location: str
    """What may be shown: no password."""
    secrets: tuple[str, ...] = ()
    """Strings that no message may show."""
    has_password: bool = False
    """Whether the URL holds one."""

    def __repr__(self) -> str:
        return f"Settings({self.location!r})"

    def hide(self, text: str) -> str:
        """Return another program's text without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text


def settings_of(
    url: str, *, schema: str | None = None, connections: int | None = None
) -> PostgresSettings:
    """Parse a URL; arguments take precedence over its parameters.

    Raises:
        ConfigError: A part of it is not valid.

    """
    scheme, _, remainder = url.partition(":")
    if scheme.lower() not in ("postgresql", "postgres") or not remainder.startswith("//"):
        raise ConfigError(
            "a PostgreSQL store's URL is postgresql://user@host:5432/database", option="url"
        )
    address, _, query = remainder[2:].partition("?")
    authority, slash, database = address.partition("/")
    login, at, hosts = authority.rpartition("@")
    _require_unambiguous("" if at else hosts, database, query)
    parameters: dict[str, str] = {}
    """By name, still quoted; libpq does not read ``+`` as a space."""
    others = []
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        parameters[unquote(name)] = text
        if unquote(name) not in _OWN:
            others.append(part)
    own = {name: unquote(text) for name, text in parameters.items() if name in _OWN}
    schema_name = _schema(schema if schema is not None else own.get("schema", SCHEMA))
    suffix = "" if schema_name == SCHEMA else f"?schema={quote(schema_name)}"
    user, _, password = login.partition(":")
    hidden = [password, *(value for name, value in parameters.items() if name in _SECRET)]
    return PostgresSettings(
        conninfo=f"postgresql://{address}{'?' if others else ''}{'&'.join(others)}",
        schema=schema_name,
        connections=_connections(connections, own.get("connections")),
        timeout=_timeout(own.get("timeout")),
        location=f"postgresql://{user}{at}{hosts}{slash}{database}{suffix}",
        has_password=bool(password or parameters.get("password")),
        secrets=tuple({form for text in hidden for form in (text, unquote(text)) if form}),
    )


def _require_unambiguous(hosts: str, database: str, query: str) -> None:
    """Raise if a password cuts the address: its parts would be shown as port and database.

    Text after a login's last @ is never part of a password.
    """
    ports = [host.rpartition(":")[2] for host in hosts.split(",") if _PORT.search(host)]
    others = [part for part in query.split("&") if part and "=" not in part]
    if "@" in database or others or not all(port.isdecimal() for port in ports if port):
        raise ConfigError(
            "this PostgreSQL URL cannot be read: a character in its user, password or host cuts "
            "it in two; write @ # / ? : there as %40 %23 %2F %3F %3A",
            option="url",
        )


def quoted(name: str) -> str:
    """Return a name as a quoted SQL identifier.

    >>> print(quoted('my "own" schema'))
    "my ""own"" schema"
    """
    return '"' + name.replace('"', '""') + '"'


def _schema(name: str) -> str:
    size = len(name.encode("utf-8", "replace"))
    if not 0 < size <= _NAME_BYTES or not name.isprintable():
        reason = f"it must have 1 to {_NAME_BYTES} bytes and no control characters"
    elif name.lower().startswith("pg_") or name.lower() == "information_schema":
        reason = "PostgreSQL reserves this name"
    else:
        return name
    raise ConfigError(
        f"invalid schema={name[:80]!r}: {reason}; use a name such as {SCHEMA}",
        option="schema",
        value=name,
    )


def _timeout(parameter: str | None) -> float:
    if parameter is None:
        return TIMEOUT
    try:
        seconds = float(parameter)
    except ValueError:
        seconds = 0.0
    if not _MIN_TIMEOUT <= seconds <= _MAX_TIMEOUT:
        expected = f"{_MIN_TIMEOUT} to {_MAX_TIMEOUT:g} seconds"
        raise ConfigError(
            f"invalid timeout={parameter!r}: expected {expected}", option="timeout", value=parameter
        )
    return seconds


def _connections(argument: int | None, parameter: str | None) -> int:
    value = str(argument) if argument is not None else parameter
    if value is None:
        return CONNECTIONS
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else 0
    if not 2 <= number <= _MAX_CONNECTIONS:
        raise ConfigError(
            f"invalid connections={value!r}: expected 2 to {_MAX_CONNECTIONS}",
            option="connections",
            value=value,
        )
    return number
