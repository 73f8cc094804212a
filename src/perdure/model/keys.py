"""What names a session: tenant, agent and session, compared whole.

A key is a value of three separate parts, never one joined string, so that no
choice of ids can make two sessions one.
"""

from __future__ import annotations

import msgspec

from perdure.errors import ConfigError

MAX_ID_BYTES = 1024
"""The longest id, in UTF-8 bytes."""

DEFAULT_SESSION = "default"


class SessionKey(msgspec.Struct, frozen=True, order=True):
    """Name one session of one agent of one tenant."""

    agent: str
    """The id that was given to ``open``."""
    session: str = DEFAULT_SESSION
    """One of the agent's conversations."""
    tenant: str = ""
    """Whose it is, where several customers share a store."""

    def __post_init__(self) -> None:
        _check("agent id", self.agent)
        _check("session id", self.session)
        if self.tenant:
            _check("tenant", self.tenant)

    def __str__(self) -> str:
        session = "" if self.session == DEFAULT_SESSION else f"/{self.session}"
        tenant = f"{self.tenant}:" if self.tenant else ""
        return f"{tenant}{self.agent}{session}"


def _check(what: str, value: str) -> None:
    if not isinstance(value, str):
        message = f"{what} must be a string, not {type(value).__name__}"
        raise ConfigError(message, option=what)
    if not value:
        message = f"{what} is empty: give it at least one character"
        raise ConfigError(message, option=what)
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        message = f"{what} {value!r} holds a control character: remove it"
        raise ConfigError(message, option=what, value=value)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        message = f"{what} {value!r} holds a lone surrogate, which is not text: remove it"
        raise ConfigError(message, option=what) from None
    if size > MAX_ID_BYTES:
        message = f"{what} is {size} bytes long, the limit is {MAX_ID_BYTES}: use a shorter one"
        raise ConfigError(message, option=what, size=size)
