"""Session keys: tenant, agent and session, compared as a whole.

A key is a value of three separate parts, never one joined string, so that no
choice of ids can make two sessions one.

Agent ids that begin with ``perdure:`` are perdure's own: a store's keys, a backup's journal, and
scopes. Who may name one is decided here, by the function that makes the key: `session_key` for ids
that a program was given, `stored_key` for what an operator names or a file brings.
"""

from __future__ import annotations

import re
from typing import Self, final

import msgspec

from perdure.errors import InvalidArgumentError

MAX_ID_BYTES = 1024
"""The longest id, in UTF-8 bytes."""

DEFAULT_SESSION = "default"

_RESERVED = "perdure:"
"""Prefix of the agent ids of perdure's own sessions."""

KEYRING = f"{_RESERVED}keyring"
"""The agent id of the sessions that hold an encrypted store's keys, one for each tenant."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

SCOPES = f"{_RESERVED}scope"
"""The agent id of the sessions that are scopes; the session's id is the scope's."""


class SessionKey(msgspec.Struct, frozen=True, order=True):
    """Name one session of one agent of one tenant."""

    agent: str
    """The id that was given to ``open``."""
    session: str = DEFAULT_SESSION
    """One of the agent's conversations."""
    tenant: str = ""
    """The customer, if several share a store."""

    def __post_init__(self) -> None:
        _check("agent id", self.agent)
        _check("session id", self.session)
        if self.session == DEFAULT_SESSION and self.session is not DEFAULT_SESSION:
            # Encoders omit a default by its identity: equal keys must encode to the same bytes.
            msgspec.structs.force_setattr(self, "session", DEFAULT_SESSION)
        _check_tenant(self.tenant)

    def __str__(self) -> str:
        session = "" if self.session == DEFAULT_SESSION else f"/{self.session}"
        tenant = f"{self.tenant}:" if self.tenant else ""
        return f"{tenant}{self.agent}{session}"

    @property
    def blobs(self) -> str:
        """The tenant, for calls of a store that are about this session's blobs."""
        return SessionTenant(self)


@final
class SessionTenant(str):
    """The tenant of a session whose blobs a call of a store is about.

    Stores keep blobs by tenant, and take it for that. An encrypted store keeps a session's blobs
    under the session's own key, so that nothing of them can be read once the key is destroyed.
    """

    __slots__ = ("key",)

    key: SessionKey

    def __new__(cls, key: SessionKey) -> Self:
        """Return the tenant of a session."""
        tenant = super().__new__(cls, key.tenant)
        tenant.key = key
        return tenant

    def __getnewargs__(self) -> tuple[SessionKey]:  # type: ignore[override]  # for copies of it
        return (self.key,)


# Built here, and not by two threads at their first decode: see `perdure.records.json`.
msgspec.json.Decoder(SessionKey)


def session_key(agent: str, session: str = DEFAULT_SESSION, tenant: str = "") -> SessionKey:
    """Return the key of a session that a program names, by ids that its users may have chosen.

    Raises:
        InvalidArgumentError: It is no key, or a session of perdure's own.

    """
    key = SessionKey(agent, session, tenant)
    if agent.startswith(_RESERVED):
        cure = "`sessions.scope(…)` is for scopes" if agent == SCOPES else "choose another"
        raise InvalidArgumentError(
            f"the agent id {agent!r} is perdure's own, as all that begin with {_RESERVED!r}: "
            f"{cure}",
            option="agent id",
            value=agent,
        )
    return key


def stored_key(agent: str, session: str = DEFAULT_SESSION, tenant: str = "") -> SessionKey:
    """Return the key of a session that an operator names, or a file brings: a scope is one.

    Raises:
        InvalidArgumentError: It is no key, or a store's keys, or a backup's journal.

    """
    return (
        SessionKey(agent, session, tenant)
        if agent == SCOPES
        else session_key(agent, session, tenant)
    )


def salvage_cure(key: SessionKey) -> str:
    """Return the cure for a damaged session without a copy: the command that exports the rest.

    >>> salvage_cure(SessionKey("my agent", "two"))
    "bring out what is left of it by `perdure export 'my agent' --session two --salvage --out FILE`"
    """
    import shlex

    names = [key.agent]
    names += ["--session", key.session] if key.session != DEFAULT_SESSION else []
    names += ["--tenant", key.tenant] if key.tenant else []
    return (
        f"bring out what is left of it by `perdure export {shlex.join(names)} --salvage --out FILE`"
    )


def require_filters(
    *,
    tenant: str = "",
    owner: str | None = None,
    tag: str | None = None,
    prefix: str = "",
    since: float | None = None,
    before: float | None = None,
) -> None:
    """Raise InvalidArgumentError for a filter that is no text or time, or that no id can match."""
    _check_tenant(tenant)
    for what, value in (("owner", owner), ("tag", tag), ("prefix", prefix)):
        if value is not None:
            require_text(what, value)
    _require_printable("prefix", prefix)
    for what, at in (("since", since), ("before", before)):
        if at is not None and not isinstance(at, int | float):
            raise InvalidArgumentError(
                f"invalid {what}={at!r}: give seconds since 1970", option=what, value=at
            )


def _check_tenant(tenant: str) -> None:
    if tenant != "":  # also where it is None, or another value that is no text
        _check("tenant", tenant)


def _check(what: str, value: str) -> None:
    size = require_name(what, value)
    _require_printable(what, value)
    _require_short(what, size)


def _require_short(what: str, size: int) -> None:
    if size > MAX_ID_BYTES:
        raise InvalidArgumentError(
            f"{what} is {size} bytes long, the limit is {MAX_ID_BYTES}: use a shorter one",
            option=what,
            size=size,
        )


def _require_printable(what: str, value: str) -> None:
    if _CONTROL.search(value):
        raise InvalidArgumentError(
            f"{what} {value!r} holds a control character: remove it", option=what, value=value
        )


def require_name(what: str, value: str) -> int:
    """Return the size of a text in bytes; raise InvalidArgumentError if it is empty or not text."""
    size = require_text(what, value)
    if not size:
        raise InvalidArgumentError(f"{what} is empty: give it at least one character", option=what)
    return size


def require_owner(owner: str) -> None:
    """Raise InvalidArgumentError for an owner that is not text, or too long for an index."""
    _require_short("owner", require_text("owner", owner))


def require_whole(**numbers: int | None) -> None:
    """Raise InvalidArgumentError for a number of records, or of a record, that is none."""
    for what, value in numbers.items():
        if value is not None and type(value) is not int:
            raise InvalidArgumentError(
                f"invalid {what}={value!r}: give a whole number", option=what, value=value
            )


def require_list(what: str, values: object) -> None:
    """Raise InvalidArgumentError for one text where several belong: its letters would be taken."""
    if isinstance(values, str):
        raise InvalidArgumentError(
            f"invalid {what}={values!r}: give a list, such as [{values!r}]",
            option=what,
            value=values,
        )


def require_text(what: str, value: str) -> int:
    """Return the size of a text in bytes; raise InvalidArgumentError if it is not text."""
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{what} must be a string, not {type(value).__name__}", option=what
        )
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{what} {value!r} holds a lone surrogate, which is not text: remove it", option=what
        ) from None


BACKUP_JOURNAL = SessionKey(f"{_RESERVED}backup", "journal")
"""The session with a backup's own description; no other store has one."""


def keyring_of(tenant: str) -> SessionKey:
    """Return the session that holds a tenant's key; the unnamed tenant's marks the store."""
    return SessionKey(KEYRING, "tenant", tenant)
