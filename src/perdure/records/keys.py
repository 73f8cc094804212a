"""Session keys: tenant, agent and session, compared as a whole.

A key is a value of three separate parts, never one joined string, so that no
choice of ids can make two sessions one.
"""

from __future__ import annotations

import re

import msgspec

from perdure.errors import InvalidArgumentError

MAX_ID_BYTES = 1024
"""The longest id, in UTF-8 bytes."""

DEFAULT_SESSION = "default"

KEYRING = "perdure:keyring"
"""The agent id of the sessions that hold an encrypted store's keys, one for each tenant."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

SCOPES = "perdure:scope"
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


# Built here, and not by two threads at their first decode: see `perdure.records.json`.
msgspec.json.Decoder(SessionKey)


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
    *, tenant: str = "", owner: str | None = None, tag: str | None = None, prefix: str = ""
) -> None:
    """Raise InvalidArgumentError for a filter that is not text, or that no id can match."""
    _check_tenant(tenant)
    for what, value in (("owner", owner), ("tag", tag), ("prefix", prefix)):
        if value is not None:
            require_text(what, value)
    _require_printable("prefix", prefix)


def _check_tenant(tenant: str) -> None:
    if tenant != "":  # also where it is None, or another value that is no text
        _check("tenant", tenant)


def _check(what: str, value: str) -> None:
    size = require_name(what, value)
    _require_printable(what, value)
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


BACKUP_JOURNAL = SessionKey("perdure:backup", "journal")
"""The session with a backup's own description; no other store has one."""


def keyring_of(tenant: str) -> SessionKey:
    """Return the session that holds a tenant's key; the unnamed tenant's marks the store."""
    return SessionKey(KEYRING, "tenant", tenant)
