"""Access to a server: bearer tokens with their tenant and owners, and rules for browsers.

Tokens are kept as SHA-256 digests, and compared in constant time. A token that is unknown and an
agent that is another's give nothing away: 401, and 404 as for an agent that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import msgspec

from perdure.asgi.browsers import ANY, LOOPBACK, BrowserRules
from perdure.asgi.responses import Problem, Scope
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.records.keys import require_list, require_owner

_ORIGIN: Final = re.compile(r"https?://[^\s/?#@\\,*]+")

SHORTEST: Final = 16
"""Characters that a token has at least."""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bearer token, and what it opens.

    Args:
        token: The token itself, of at least 16 characters.
        sha256: Or its SHA-256 digest in hex, so that the file holds no secret.
        tenant: Whose agents it opens.
        owners: Of which owners; the first one owns the agents that it makes. Empty: all of the
            tenant's agents.
        metrics: Whether it opens the figures of the whole process, and nothing else.

    Raises:
        InvalidArgumentError: There is not exactly one of token and digest, or one is invalid, or
            a token for figures has a tenant or owners.

    """

    token: str | None = None
    sha256: str | None = None
    tenant: str = ""
    owners: tuple[str, ...] = ()
    metrics: bool = False

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
        if self.metrics and (self.tenant or self.owners):
            raise InvalidArgumentError(
                "a token with metrics opens the figures of all tenants, and no agents: give it "
                "no tenant and no owners",
                option="metrics",
            )
        require_list("owners", self.owners)
        for owner in self.owners:
            require_owner(owner)

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
        if self.metrics:
            return "Token(metrics=True)"
        return f"Token(tenant={self.tenant!r}, owners={self.owners!r})"

    @property
    def owner(self) -> str | None:
        """The owner of the agents that it makes."""
        return self.owners[0] if self.owners else None

    def opens(self, owner: str | None) -> bool:
        """Return whether it opens an owner's agents."""
        return not self.owners or owner in self.owners


EVERYTHING: Final = Token(token="-" * SHORTEST)
"""The rights of a request where no tokens are given: all of the tenant without a name."""


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
        tokens: The tokens that open it; None: requests need none, so nothing but programs of this
            machine and the server's own pages may send them.
        hosts: The names in the Host header that are answered to; "*" for any.
        origins: Other sites whose pages may send requests, such as ``https://app.example.com``;
            "*" for any.

    Raises:
        ConfigError: Without tokens, any host or any site is let in.

    """

    def __init__(
        self,
        tokens: Sequence[Token] | None = None,
        *,
        hosts: Collection[str] = LOOPBACK,
        origins: Collection[str] = (),
    ) -> None:
        for option, names in (("allow-host", hosts), ("allow-origin", origins)):
            if tokens is None and ANY in names:
                raise ConfigError(
                    f"--{option} '*' lets every web page run turns here: give tokens, or name them",
                    option=option,
                )
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"invalid --allow-origin {origin!r}: give it as https://name or "
                    "http://name:port",
                    option="allow-origin",
                    value=origin,
                )
        self._tokens = None if tokens is None else [(token.digest, token) for token in tokens]
        self._rules = BrowserRules(hosts=hosts, origins=origins, links=False)
        self.origins: tuple[str, ...] = tuple(origins)
        """Other sites whose pages may send requests."""

    @property
    def is_open(self) -> bool:
        """True if requests need no token."""
        return self._tokens is None

    def check_browser(self, scope: Scope) -> None:
        """Refuse what another site makes a browser send.

        Raises:
            Problem: It is for another host, or from another site.

        """
        self._rules.check(scope)

    def check_content(self, headers: Mapping[str, str]) -> None:
        """Refuse a body that any site's form could send, where no token is needed.

        Raises:
            Problem: It does not say that it is JSON.

        """
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if self.is_open and kind != "application/json":
            raise Problem(415, "Not JSON", "send `Content-Type: application/json`")

    def token_of(self, headers: Mapping[str, str], *, for_metrics: bool = False) -> Token:
        """Return the token that a request has.

        Args:
            headers: The request's.
            for_metrics: Whether it asks for the figures of the whole process.

        Raises:
            Problem: It has none, an unknown one, or one for something else.

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
            raise Problem(
                401,
                "Unauthorized",
                "send `Authorization: Bearer TOKEN`",
                headers={"www-authenticate": 'Bearer realm="perdure"'},
            )
        if found.metrics != for_metrics:
            raise Problem(403, "Forbidden", "this token does not open that")
        return found


def not_found(id: str) -> Problem:
    """Return the answer for an agent that is not there, or is another's."""
    return Problem(404, "Not found", f"there is no agent {id!r}", code="SessionNotFoundError")
