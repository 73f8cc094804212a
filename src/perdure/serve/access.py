"""Who may do what: bearer tokens with their tenant and owners, and the hosts that are answered to.

Tokens are kept as SHA-256 digests, and compared in constant time. A token that is unknown and an
agent that is another's give nothing away: 401, and 404 as for an agent that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final, final

import msgspec

from perdure.asgi.responses import Problem
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.records.keys import require_text

SHORTEST: Final = 16
"""Characters that a token has at least."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bearer token, and what it opens.

    Args:
        token: The token itself, of at least 16 characters.
        sha256: Or its SHA-256 digest in hex, so that the file holds no secret.
        tenant: Whose agents it opens.
        owners: Of which owners; the first one owns the agents that it makes. Empty: all of the
            tenant's agents.

    Raises:
        InvalidArgumentError: There is not exactly one of token and digest, or one is invalid.

    """

    token: str | None = None
    sha256: str | None = None
    tenant: str = ""
    owners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.token is None) == (self.sha256 is None):
            raise InvalidArgumentError("a token has either token or sha256", option="token")
        if self.token is not None and len(self.token) < SHORTEST:
            raise InvalidArgumentError(
                f"a token has at least {SHORTEST} characters: make one with `openssl rand`",
                option="token",
            )
        if len(self.digest) != 32:
            raise InvalidArgumentError("sha256 is not 64 hex digits", option="sha256")
        for owner in self.owners:
            require_text("owner", owner)

    @property
    def digest(self) -> bytes:
        """The token's SHA-256."""
        if self.token is not None:
            return hashlib.sha256(self.token.encode()).digest()
        try:
            return bytes.fromhex(self.sha256 or "")
        except ValueError:
            return b""

    def __repr__(self) -> str:
        return f"Token(tenant={self.tenant!r}, owners={self.owners!r})"

    @property
    def owner(self) -> str | None:
        """Who owns what it makes."""
        return self.owners[0] if self.owners else None

    def opens(self, owner: str | None) -> bool:
        """Whether it opens an owner's agents."""
        return not self.owners or owner in self.owners


EVERYTHING: Final = Token(token="-" * SHORTEST)
"""What a request may do where no tokens are given: all of the tenant without a name."""


def read_tokens(text: str) -> tuple[Token, ...]:
    """Return the tokens of a JSON list: ``[{"token": "…", "tenant": "acme", "owners": []}]``.

    Raises:
        ConfigError: It is no such list, or it is empty.

    """
    try:
        tokens = msgspec.json.decode(text, type=tuple[Token, ...])
    except (msgspec.DecodeError, InvalidArgumentError) as error:
        raise ConfigError(f"invalid tokens: {error}", option="tokens") from None
    if not tokens:
        raise ConfigError("invalid tokens: the list is empty", option="tokens")
    return tokens


@final
class Access:
    """Check the requests to a server.

    Args:
        tokens: The tokens that open it; None: requests need none.
        hosts: The names in the Host header that are answered to; "*" for any.

    """

    def __init__(
        self, tokens: Sequence[Token] | None = None, *, hosts: Sequence[str] = LOOPBACK
    ) -> None:
        self._tokens = None if tokens is None else [(token.digest, token) for token in tokens]
        self._hosts = {host.lower() for host in hosts}

    @property
    def is_open(self) -> bool:
        """Whether requests need no token."""
        return self._tokens is None

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse a request that a browser was tricked into sending here.

        Raises:
            Problem: It is for another host.

        """
        name = headers.get("host", "").lower()
        bare = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if "*" not in self._hosts and bare not in self._hosts:
            raise Problem(421, "Wrong host", "no such host here: see --allow-host")

    def token_of(self, headers: Mapping[str, str]) -> Token:
        """Return the token that a request has.

        Raises:
            Problem: It has none, or an unknown one.

        """
        if self._tokens is None:
            return EVERYTHING
        scheme, _, value = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(value.strip().encode()).digest()
        found: Token | None = None
        for digest, token in self._tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(digest, given):
                found = token
        if found is None or scheme.lower() != "bearer":
            challenge = {"www-authenticate": 'Bearer realm="perdure"'}
            raise Problem(
                401, "Unauthorized", "send `Authorization: Bearer TOKEN`", headers=challenge
            )
        return found


def not_found(id: str) -> Problem:
    """Return the answer for an agent that is not there, or is another's."""
    return Problem(404, "Not found", f"there is no agent {id!r}", code="SessionNotFoundError")
