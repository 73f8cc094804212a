"""S3 store: sessions as objects in a bucket of Amazon S3 or a compatible service."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from perdure.errors import ConfigError, MissingExtraError, StoreUnavailableError
from perdure.stores.objects import ObjectStore
from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{2,254}\Z")
_PART = re.compile(r"[A-Za-z0-9._\-=+@]+\Z")
_MAX_PREFIX = 200
_KNOWN = ("allow_http", "endpoint", "region", "timeout")

_USAGE = "use s3://BUCKET/PREFIX, optionally with ?endpoint=https://HOST:PORT&region=NAME after it"


class BucketAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Bucket, prefix and endpoint. It contains no credentials, so it can be shown."""

    bucket: str
    prefix: str
    """Empty, or ending in a slash."""
    endpoint: str | None
    allow_http: bool
    """True if an endpoint on another host may be used without encryption."""
    region: str | None
    timeout: float
    """Seconds that one request may take."""

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.bucket):
            raise ConfigError(
                f"{self.bucket!r} is not a valid name of a bucket: {_USAGE}", option="bucket"
            )
        steps = self.prefix.removesuffix("/").split("/") if self.prefix else []
        if not all(_PART.match(step) and step.strip(".") for step in steps):
            raise ConfigError(
                f"invalid prefix {self.prefix!r}: use letters, digits and . _ - = + @, "
                "with single slashes between its parts",
                option="prefix",
            )
        if len(self.prefix) > _MAX_PREFIX:
            raise ConfigError(
                f"the prefix has {len(self.prefix)} characters, the limit is {_MAX_PREFIX}",
                option="prefix",
            )
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(
                f"invalid timeout={self.timeout!r}: use seconds above 0", option="timeout"
            )
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
            require_encrypted(self.endpoint, allow_http=self.allow_http)

    def __str__(self) -> str:
        endpoint = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{endpoint}"


def require_encrypted(endpoint: str, *, allow_http: bool) -> None:
    """Refuse http:// to another host, unless it is allowed.

    Raises:
        ConfigError: Data and credentials would cross a network in plain text.

    """
    try:
        url = urlsplit(endpoint)
        host = url.hostname or ""
    except ValueError:  # the driver refuses it, too
        return
    if url.scheme != "http" or allow_http or _is_loopback(host):
        return
    raise ConfigError(
        f"the endpoint http://{host} is reached without encryption, so all stored data "
        "could be read and changed on its way: use https://, or allow_http=true if that "
        "network is trusted (s3://BUCKET/PREFIX?endpoint=…&allow_http=true, or "
        "S3Store(…, allow_http=True))",
        option="endpoint",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check_endpoint(endpoint: str) -> None:
    try:
        url = urlsplit(endpoint)
        fits = url.scheme in {"http", "https"} and bool(url.hostname) and not url.query
        fits = fits and url.path in {"", "/"} and (url.port is None or url.port > 0)
    except ValueError:
        fits = False
        url = urlsplit("")
    if "@" in endpoint:
        raise ConfigError(
            "the endpoint contains credentials: leave them out, and set the AWS_… variables",
            option="endpoint",
        )
    if not fits:
        raise ConfigError(
            "the endpoint is invalid: use http://HOST:PORT or https://HOST, with nothing after it",
            option="endpoint",
        )


# Mapping of the driver's errors to perdure's


_STATUS = re.compile(r"(?:non-2xx status code|\bstatus): (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Request|Interrupted|Decode|Unknown)\b")

_CURES = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the URL",
    "InvalidAccessKeyId": "the service does not know the access key: check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret does not match the access key: check "
    "AWS_SECRET_ACCESS_KEY and the region",
    "AccessDenied": "the credentials do not permit this: allow s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket",
    "RequestTimeTooSkewed": "this host's clock differs from the server's: set it (chronyd, ntpd)",
    "ExpiredToken": "the credentials have expired: renew them",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set region=… in the URL",
    "PermanentRedirect": "the bucket is in another region: set region=… in the URL",
    "SlowDown": "the service limits requests: saves are retried automatically",
    "InvalidDigest": "the request was damaged on its way: saves are retried automatically",
}
_BY_STATUS = {
    "401": "the credentials are refused: check the AWS_… variables",
    "403": "the credentials do not permit this: check the AWS_… variables and the policy",
    "404": "it does not exist: check the bucket's name and the endpoint",
    "429": "the service limits requests: saves are retried automatically",
    "503": "the service is busy or down: saves are retried automatically",
}

_UNWRITTEN = frozenset({"301", "307", "400", "401", "403", "404", "405", "411", "429", "503"})
"""Refusals: nothing was written. After any other status that is not known."""

_MAX_DETAIL = 200


def error_for(error: Exception, doing: str, location: str) -> StoreUnavailableError:
    """Return the perdure error; its fact ``unwritten`` states that nothing was written."""
    text = str(error)
    status, code, kind = (
        match[1] if (match := pattern.search(text)) else "" for pattern in (_STATUS, _CODE, _KIND)
    )
    refused = kind == "Connect"
    if code in _CURES or status in _BY_STATUS:
        reason = _CURES.get(code) or _BY_STATUS[status]
    elif "Received redirect" in text:
        reason, code = _CURES["PermanentRedirect"], "PermanentRedirect"
    elif refused:
        reason = "nothing answers at this address: check the endpoint, and that the service runs"
    elif kind == "Timeout":
        reason = (
            "no reply in time: check the network and the service; saves are retried automatically"
        )
    elif "metadata" in text or "169.254." in text or "credential" in text.lower():
        reason = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    else:
        reason = f"{text.partition(chr(10))[0][:_MAX_DETAIL]}"
    answer = f" ({f'{status} {code}'.strip()})" if status or code else ""
    return StoreUnavailableError(
        f"cannot {doing} {location}{answer}: {reason}",
        path=location,
        status=int(status) if status else None,
        code=code,
        unwritten=refused
        or code == "PermanentRedirect"
        or (status in _UNWRITTEN and code != "RequestTimeout"),
    )


# The bucket: each call is one request, with a deadline


A = TypeVar("A")
B = TypeVar("B")

_CONCURRENCY = 16
"""Concurrent requests of one call."""
_PAGE = 1000
_RETRIES = 2

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@final
class S3Bucket(Bucket):
    """The objects under a prefix. Credentials are passed to the driver and not stored elsewhere."""

    def __init__(self, address: BucketAddress, credentials: dict[str, str]) -> None:
        try:
            import obstore
            from obstore.exceptions import (
                AlreadyExistsError,
                BaseError,
                NotModifiedError,
                PreconditionError,
            )
        except ImportError:
            raise MissingExtraError(
                "an s3: store needs a driver that is not installed: pip install 'perdure[s3]'",
                extra="s3",
            ) from None
        self._obs = obstore
        self._exists = (AlreadyExistsError, PreconditionError, NotModifiedError)
        self._errors = (BaseError, OSError, ValueError)
        self._location = str(address)
        self._prefix = address.prefix
        self._writes = _client(address, credentials, retries=0)
        self._reads = _client(address, credentials, retries=_RETRIES)
        self._threads = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="perdure:s3")

    def close(self) -> None:
        """End the threads; running requests end by their deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def many(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Call a function on items concurrently; return the results in their order."""
        todo = list(items)
        if len(todo) < 2:
            return [function(item) for item in todo]
        return list(self._threads.map(function, todo))

    # reading

    def get(self, name: str) -> StoredObject | None:
        def read() -> StoredObject:
            answer = self._obs.get(self._reads, self._prefix + name)
            return StoredObject(bytes(answer.bytes()), answer.meta["e_tag"] or "")

        return self._unless_missing(read, f"read {name} of")

    def part(self, name: str, start: int, end: int) -> bytes | None:
        if start == end:
            return b""

        def read() -> bytes:
            try:
                place = self._prefix + name
                return bytes(self._obs.get_range(self._reads, place, start=start, end=end))
            except self._errors as error:
                if "416" in str(error) or "InvalidRange" in str(error):
                    return b""  # it is shorter
                raise

        data = self._unless_missing(read, f"read {name} of")
        return data if data is not None and len(data) == end - start else None

    def stat(self, name: str) -> ListedObject | None:
        return self._unless_missing(
            lambda: self._listed(self._obs.head(self._reads, self._prefix + name)),
            f"read the size of {name} in",
        )

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        start = None if after is None else self._prefix + after
        try:
            for page in self._obs.list(
                self._reads, self._prefix + prefix, offset=start, chunk_size=_PAGE
            ):
                yield [self._listed(meta) for meta in page]
        except self._errors as error:
            raise error_for(error, "list", self._location) from error

    def folders(self, prefix: str) -> list[str]:
        try:
            listing = self._obs.list_with_delimiter(self._reads, self._prefix + prefix)
        except self._errors as error:
            raise error_for(error, "list", self._location) from error
        return sorted(name.rpartition("/")[2] for name in listing["common_prefixes"])

    # writing

    def create(self, name: str, data: bytes) -> str | None:
        return self._put(name, data, "create")

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return self._put(name, data, {"e_tag": tag})

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data, "overwrite")

    def _put(self, name: str, data: bytes, mode: Any) -> str | None:
        try:
            answer = self._obs.put(
                self._writes, self._prefix + name, data, mode=mode, use_multipart=False
            )
        except self._errors as error:
            # An unconditional write fails no condition: a conflict there is an ordinary refusal.
            if mode != "overwrite" and isinstance(error, self._exists):
                return None
            if isinstance(mode, dict) and _is_missing(error):
                return None
            raise error_for(error, f"write {name} to", self._location) from error
        return answer["e_tag"] or ""

    def copy(self, name: str, to: str) -> bool:
        def copy() -> bool:
            self._obs.copy(self._writes, self._prefix + name, self._prefix + to)
            return True

        return self._unless_missing(copy, f"copy {name} in") or False

    def remove(self, names: Collection[str]) -> None:
        todo = list(names)
        for start in range(0, len(todo), _PAGE):
            page = [self._prefix + name for name in todo[start : start + _PAGE]]
            remove = partial(self._obs.delete, self._writes, page)  # one request
            self._unless_missing(remove, f"remove {len(page)} objects from")

    def _unless_missing(self, ask: Callable[[], A], doing: str) -> A | None:
        """Return what *ask* returns, None if the object does not exist."""
        try:
            return ask()
        except self._errors as error:
            if _is_missing(error):
                return None
            raise error_for(error, doing, self._location) from error

    def _listed(self, meta: Any) -> ListedObject:
        name = meta["path"].removeprefix(self._prefix)
        tag = meta["e_tag"] or ""
        return ListedObject(name, meta["size"], meta["last_modified"].timestamp(), tag)


def _is_missing(error: Exception) -> bool:
    """Return whether an object does not exist, though its bucket does."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def _client(address: BucketAddress, credentials: dict[str, str], *, retries: int) -> Any:
    from obstore.store import S3Store as Client

    options: dict[str, Any] = dict(credentials)
    endpoint = address.endpoint
    if endpoint is not None:
        options["endpoint"] = endpoint.rstrip("/")
    else:
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        require_encrypted(endpoint, allow_http=address.allow_http)
    if address.region is not None:
        options["region"] = address.region
    deadline = datetime.timedelta(seconds=address.timeout)
    return Client(
        address.bucket,
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "timeout": deadline,
            "connect_timeout": datetime.timedelta(seconds=min(5.0, address.timeout)),
        },
        retry_config={"max_retries": retries, "retry_timeout": deadline},
        **options,
    )


_SECRETS = frozenset({"access_key_id", "secret_access_key", "session_token"})


@final
class S3Store(ObjectStore):
    """Store of sessions in a bucket of Amazon S3 or a compatible service.

    Args:
        bucket: Name of an existing bucket.
        prefix: Prefix of all objects' names, for this store alone.
        endpoint: The service's address; by default ``AWS_ENDPOINT_URL``, else Amazon's.
        allow_http: Whether an endpoint on another host may be ``http://``.
        region: By default ``AWS_REGION``.
        timeout: Seconds that one request may take.
        credentials: ``access_key_id``, ``secret_access_key`` and optionally ``session_token``; by
            default the ``AWS_…`` variables.
        owner: This store's id as a lease holder; by default a random one.

    Raises:
        ConfigError: A value is invalid.

    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        allow_http: bool = False,
        region: str | None = None,
        timeout: float = 30.0,
        credentials: Mapping[str, str] | None = None,
        owner: str | None = None,
    ) -> None:
        prefix = prefix.strip("/")
        address = BucketAddress(
            bucket=bucket,
            prefix=f"{prefix}/" if prefix else "",
            endpoint=endpoint,
            allow_http=allow_http,
            region=region,
            timeout=timeout,
        )
        secrets = dict(credentials or {})
        unknown = secrets.keys() - _SECRETS
        if unknown:
            raise ConfigError(
                f"credentials has no {min(unknown)!r}: it takes access_key_id, secret_access_key "
                "and session_token",
                option="credentials",
            )
        super().__init__(lambda: S3Bucket(address, secrets), location=str(address), owner=owner)

    @classmethod
    def at(cls, url: str) -> S3Store:
        """Return the store at a URL, with credentials from the environment.

        Raises:
            ConfigError: The URL is invalid.

        """
        parts = urlsplit(f"s3:{url.removeprefix('s3:')}")
        if "@" in parts.netloc:
            raise ConfigError(
                "an s3: URL must not have credentials, since logs show it: leave them out, and set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                option="url",
            )
        if not parts.netloc or parts.fragment:
            raise ConfigError(f"the s3: URL names no bucket: {_USAGE}", option="url")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in options:
            if name not in _KNOWN:
                # Not its value, which may be a password.
                raise ConfigError(
                    f"an s3: URL has no option {name!r}: it takes {', '.join(_KNOWN)}; credentials "
                    "come from the AWS_… variables",
                    option=name,
                )
        allow_http, timeout = options.get("allow_http", "false"), options.get("timeout", "30")
        if allow_http not in {"true", "false"}:
            raise ConfigError(
                "allow_http is neither true nor false: use allow_http=true, or leave it out",
                option="allow_http",
            )
        try:
            seconds = float(timeout)
        except ValueError:
            raise ConfigError(
                f"timeout={timeout!r} is not a number: use seconds, such as 30", option="timeout"
            ) from None
        return cls(
            parts.netloc,
            unquote(parts.path),
            endpoint=options.get("endpoint"),
            allow_http=allow_http == "true",
            region=options.get("region"),
            timeout=seconds,
        )
