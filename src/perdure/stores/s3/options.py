"""Where an S3 store is: bucket, prefix and endpoint, out of a URL or arguments. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from perdure.errors import ConfigError

__all__ = ["Place", "place_of", "require_encrypted"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{2,254}\Z")
_STEP = re.compile(r"[A-Za-z0-9._\-=+@]+\Z")
_MAX_PREFIX = 200
_TIMEOUT = 30.0
_KNOWN = ("allow_http", "endpoint", "region", "timeout")

_SHAPE = "use s3://BUCKET/PREFIX, with ?endpoint=https://HOST:PORT&region=NAME behind it if need be"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the objects are. Credentials are no part of it, so it can be shown."""

    bucket: str
    prefix: str = ""
    """Empty, or ending in a slash."""
    endpoint: str | None = None
    allow_http: bool = False
    """Whether the endpoint may be reached without encryption, over a network."""
    region: str | None = None
    timeout: float = _TIMEOUT
    """Seconds that one request may take."""

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.bucket):
            message = f"{self.bucket!r} is no name of a bucket: {_SHAPE}"
            raise ConfigError(message, option="bucket")
        steps = self.prefix.removesuffix("/").split("/") if self.prefix else []
        if not all(_STEP.match(step) and step.strip(".") for step in steps):
            message = (
                f"the prefix {self.prefix!r} does not fit: use letters, digits and . _ - = + @, "
                "with single slashes between its parts"
            )
            raise ConfigError(message, option="prefix")
        if len(self.prefix) > _MAX_PREFIX:
            message = f"the prefix has {len(self.prefix)} characters, the limit is {_MAX_PREFIX}"
            raise ConfigError(message, option="prefix")
        if not 0 < self.timeout < float("inf"):
            message = f"timeout={self.timeout!r} does not fit: give seconds above 0"
            raise ConfigError(message, option="timeout")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
            require_encrypted(self.endpoint, allow_http=self.allow_http)

    def __str__(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{at}"


def place_of(rest: str) -> Place:
    """Return the place in a URL, of which *rest* stands behind ``s3:``.

    Raises:
        ConfigError: It names no bucket, or holds what it should not, such as a password.

    """
    url = urlsplit(f"s3:{rest}")
    if "@" in url.netloc:
        message = (
            "an s3: URL holds no credentials, they would be seen in logs: leave them out, and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        raise ConfigError(message, option="url")
    if not rest.startswith("//") or url.fragment:
        raise ConfigError(f"this s3: URL names no bucket: {_SHAPE}", option="url")
    prefix = unquote(url.path).strip("/")
    options = _options(dict(parse_qsl(url.query, keep_blank_values=True)))
    return Place(
        bucket=url.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=options.get("endpoint"),
        allow_http=_yes(options.get("allow_http")),
        region=options.get("region"),
        timeout=_seconds(options.get("timeout")),
    )


def _options(given: Mapping[str, str]) -> Mapping[str, str]:
    for name in given:
        if name not in _KNOWN:
            # Not its value: somebody may have tried to give a password.
            message = (
                f"an s3: URL has no option {name!r}: it takes {', '.join(_KNOWN)}; credentials "
                "come from the AWS_… variables"
            )
            raise ConfigError(message, option=name)
    return given


def require_encrypted(endpoint: str, *, allow_http: bool) -> None:
    """Refuse http:// to another machine, unless it was asked for.

    Raises:
        ConfigError: What is stored, and who asks for it, would cross a network in plain text.

    """
    scheme, _, rest = endpoint.partition("://")
    if scheme.lower() != "http" or allow_http:
        return
    host = _host_of(rest)
    if _is_loopback(host):
        return
    message = (
        f"the endpoint http://{host} is reached without encryption, so all that is stored "
        "could be read and changed on the way: use https://, or say allow_http=true if that "
        "network is trusted (s3://BUCKET/PREFIX?endpoint=…&allow_http=true, or "
        "S3Store(…, allow_http=True))"
    )
    raise ConfigError(message, option="endpoint")


def _host_of(rest: str) -> str:
    try:
        return urlsplit(f"//{rest}").hostname or ""
    except ValueError:  # the driver will refuse it as well
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _yes(given: str | None) -> bool:
    if given in (None, "false"):
        return False
    if given == "true":
        return True
    message = "allow_http is neither true nor false: say allow_http=true, or leave it out"
    raise ConfigError(message, option="allow_http")


def _seconds(given: str | None) -> float:
    try:
        return _TIMEOUT if given is None else float(given)
    except ValueError:
        message = f"timeout={given!r} is no number: give seconds"
        raise ConfigError(message, option="timeout") from None


def _check_endpoint(endpoint: str) -> None:
    try:
        url = urlsplit(endpoint)
        fits = url.scheme in {"http", "https"} and bool(url.hostname) and not url.query
        fits = fits and url.path in {"", "/"} and (url.port is None or url.port > 0)
    except ValueError:
        fits = False
        url = urlsplit("")
    if "@" in endpoint:
        message = "the endpoint holds credentials: leave them out, and set the AWS_… variables"
        raise ConfigError(message, option="endpoint")
    if not fits:
        message = (
            "the endpoint does not fit: use http://HOST:PORT or https://HOST, and nothing behind"
        )
        raise ConfigError(message, option="endpoint")
