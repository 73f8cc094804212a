"""The S3 store: sessions as objects in a bucket of S3, or of a service like it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from perdure.errors import ConfigError, MissingExtraError, StoreUnavailableError
from perdure.stores.objects import ObjectStore
from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject

# Where an S3 store is: bucket, prefix and endpoint, out of a URL or arguments. Pure


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{2,254}\Z")
_STEP = re.compile(r"[A-Za-z0-9._\-=+@]+\Z")
_MAX_PREFIX = 200
_TIMEOUT = 30.0
_KNOWN = ("allow_http", "endpoint", "region", "timeout")

_SHAPE = "use s3://BUCKET/PREFIX, with ?endpoint=https://HOST:PORT&region=NAME behind it if need be"


class BucketAddress(msgspec.Struct, frozen=True, kw_only=True):
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


def place_of(rest: str) -> BucketAddress:
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
    return BucketAddress(
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


# The driver's errors in perdure's words: what, where, and how to mend it


_STATUS = re.compile(r"non-2xx status code: (\d{3})|\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Request|Interrupted|Decode|Unknown)\b")

_CURES = {
    "NoSuchBucket": "there is no such bucket: make it, or correct the URL",
    "InvalidAccessKeyId": "the access key is not known there: look at AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret does not fit the access key: look at "
    "AWS_SECRET_ACCESS_KEY, and at the region",
    "AccessDenied": "the credentials do not permit this: allow s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's: set it (chronyd, "
    "ntpd)",
    "ExpiredToken": "the credentials have expired: renew them",
    "AuthorizationHeaderMalformed": "the region is another one: give region=… in the URL",
    "PermanentRedirect": "the bucket lies in another region: give region=… in the URL",
    "SlowDown": "the service limits requests; saving goes on by itself",
    "InvalidDigest": "the request was damaged on its way",
}
_BY_STATUS = {
    "401": "the credentials are refused: look at the AWS_… variables",
    "403": "the credentials do not permit this: look at the AWS_… variables and the policy",
    "404": "it is not there: look at the bucket's name and the endpoint",
    "429": "the service limits requests; saving goes on by itself",
    "503": "the service is busy or down; saving goes on by itself",
}

_UNWRITTEN = frozenset({"301", "307", "400", "401", "403", "404", "405", "411", "429", "503"})
"""Refusals: nothing was written. Any other answer leaves it open."""

_LONG = 200


def missing_bucket(error: Exception) -> bool:
    """Say whether an object is missing because its bucket is."""
    return "NoSuchBucket" in str(error)


def trouble(error: Exception, doing: str, where: str) -> StoreUnavailableError:
    """Return what to raise for *error*; its fact ``unwritten`` says that nothing was written."""
    text = str(error)
    status, code, kind = _found(_STATUS, text), _found(_CODE, text), _found(_KIND, text)
    refused = kind == "Connect"
    if code in _CURES or status in _BY_STATUS:
        why = _CURES.get(code) or _BY_STATUS[status]
    elif "Received redirect" in text:
        why, code = _CURES["PermanentRedirect"], "PermanentRedirect"
    elif refused:
        why = "nobody answers there: look at the endpoint, and whether the service runs"
    elif kind == "Timeout":
        why = "no answer in time: look at the network and the service; saving goes on by itself"
    elif "metadata" in text or "169.254." in text or "credential" in text.lower():
        why = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    else:
        why = f"{text.partition(chr(10))[0][:_LONG]}"
    said = f" ({f'{status} {code}'.strip()})" if status or code else ""
    return StoreUnavailableError(
        f"cannot {doing} {where}{said}: {why}",
        path=where,
        status=int(status) if status else None,
        code=code,
        unwritten=refused
        or code == "PermanentRedirect"
        or (status in _UNWRITTEN and code != "RequestTimeout"),
    )


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""


# A bucket of S3, or of a service like it: each call is one request, with a deadline


A = TypeVar("A")
B = TypeVar("B")

_FAN = 16
"""Requests that one call may have under way."""
_PAGE = 1000
_RETRIES = 2

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@final
class S3Bucket(Bucket):
    """The objects under a prefix. Credentials go to the driver and are kept nowhere else."""

    def __init__(self, place: BucketAddress, credentials: dict[str, str]) -> None:
        try:
            import obstore
            from obstore.exceptions import (
                AlreadyExistsError,
                BaseError,
                NotModifiedError,
                PreconditionError,
            )
        except ImportError:
            message = "an s3: store needs a driver that is not installed: pip install 'perdure[s3]'"
            raise MissingExtraError(message, extra="s3") from None
        self._obs = obstore
        self._exists = (AlreadyExistsError, PreconditionError, NotModifiedError)
        self._errors = (BaseError, OSError, ValueError)
        self._where = str(place)
        self._prefix = place.prefix
        self._writes = _client(place, credentials, retries=0)
        self._reads = _client(place, credentials, retries=_RETRIES)
        self._fan = ThreadPoolExecutor(_FAN, thread_name_prefix="perdure s3")

    def close(self) -> None:
        """Let the threads end; requests under way end by their deadline."""
        self._fan.shutdown(wait=False, cancel_futures=True)

    def many(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Call a function on items, several at a time; return the results in their order."""
        todo = list(items)
        if len(todo) < 2:
            return [function(item) for item in todo]
        return list(self._fan.map(function, todo))

    # reading

    def get(self, name: str) -> StoredObject | None:
        """Return an object, None if there is none."""
        try:
            answer = self._obs.get(self._reads, self._prefix + name)
            return StoredObject(bytes(answer.bytes()), answer.meta["e_tag"] or "")
        except self._errors as error:
            self._require_gone(error, f"read {name} of")
            return None

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """Return bytes of an object, None if there is none or it is shorter."""
        if start == end:
            return b""
        try:
            answer = self._obs.get_range(self._reads, self._prefix + name, start=start, end=end)
        except self._errors as error:
            if "416" in str(error) or "InvalidRange" in str(error):
                return None
            self._require_gone(error, f"read {name} of")
            return None
        data = bytes(answer)
        return data if len(data) == end - start else None

    def stat(self, name: str) -> ListedObject | None:
        """Return an object's size and age, None if there is none."""
        try:
            meta = self._obs.head(self._reads, self._prefix + name)
        except self._errors as error:
            self._require_gone(error, f"look at {name} of")
            return None
        return self._one(meta)

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        """Give the objects under *prefix* whose names are above *after*, by name, in pages."""
        start = None if after is None else self._prefix + after
        try:
            for page in self._obs.list(
                self._reads, self._prefix + prefix, offset=start, chunk_size=_PAGE
            ):
                yield [self._one(meta) for meta in page]
        except self._errors as error:
            raise trouble(error, "list", self._where) from error

    def folders(self, prefix: str) -> list[str]:
        """Return what stands between *prefix* and the next slash, each once."""
        try:
            found = self._obs.list_with_delimiter(self._reads, self._prefix + prefix)
        except self._errors as error:
            raise trouble(error, "list", self._where) from error
        return sorted(name.rpartition("/")[2] for name in found["common_prefixes"])

    # writing

    def create(self, name: str, data: bytes) -> str | None:
        """Make an object; return its tag, None where one of that name is there."""
        return self._put(name, data, "create")

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace an object; return the new tag, None where *tag* is no longer its own."""
        return self._put(name, data, {"e_tag": tag})

    def put(self, name: str, data: bytes) -> None:
        """Make or replace an object, whatever is there."""
        self._put(name, data, "overwrite")

    def _put(self, name: str, data: bytes, mode: Any) -> str | None:
        try:
            answer = self._obs.put(
                self._writes, self._prefix + name, data, mode=mode, use_multipart=False
            )
        except self._errors as error:
            # What has no condition fails none: a conflict there is a refusal like any other.
            if mode != "overwrite" and isinstance(error, self._exists):
                return None
            if isinstance(mode, dict) and _gone(error):
                return None
            raise trouble(error, f"write {name} to", self._where) from error
        return answer["e_tag"] or ""

    def copy(self, name: str, to: str) -> bool:
        """Copy an object; False if there is none."""
        try:
            self._obs.copy(self._writes, self._prefix + name, self._prefix + to)
        except self._errors as error:
            self._require_gone(error, f"copy {name} in")
            return False
        return True

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; those that are not there have no effect."""
        self.many(self._remove, names)

    def _remove(self, name: str) -> None:
        try:
            self._obs.delete(self._writes, self._prefix + name)
        except self._errors as error:
            self._require_gone(error, f"remove {name} from")

    def _require_gone(self, error: Exception, doing: str) -> None:
        """Raise whatever is not about an object that is not there."""
        if _gone(error):
            return
        raise trouble(error, doing, self._where) from error

    def _one(self, meta: Any) -> ListedObject:
        name = meta["path"].removeprefix(self._prefix)
        tag = meta["e_tag"] or ""
        return ListedObject(name, meta["size"], meta["last_modified"].timestamp(), tag)


def _gone(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) and not missing_bucket(error)


def _client(place: BucketAddress, credentials: dict[str, str], *, retries: int) -> Any:
    from obstore.store import S3Store as Client

    options: dict[str, Any] = dict(credentials)
    endpoint = place.endpoint
    if endpoint is not None:
        options["endpoint"] = endpoint.rstrip("/")
    else:
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        require_encrypted(endpoint, allow_http=place.allow_http)
    if place.region is not None:
        options["region"] = place.region
    deadline = datetime.timedelta(seconds=place.timeout)
    return Client(
        place.bucket,
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "timeout": deadline,
            "connect_timeout": datetime.timedelta(seconds=min(5.0, place.timeout)),
        },
        retry_config={"max_retries": retries, "retry_timeout": deadline},
        **options,
    )


# The S3 store: an object store on a bucket of S3, for any number of servers


_SECRETS = frozenset({"access_key_id", "secret_access_key", "session_token"})


@final
class S3Store(ObjectStore):
    """Keep sessions in a bucket of S3, or of a service like it.

    Args:
        bucket: Its name; it must be there.
        prefix: What the names of all objects begin with; a store has it for itself.
        endpoint: The service's address; by default ``AWS_ENDPOINT_URL``, else Amazon's.
        allow_http: Whether an endpoint on another machine may be ``http://``.
        region: By default ``AWS_REGION``.
        timeout: Seconds that one request may take.
        credentials: ``access_key_id``, ``secret_access_key`` and perhaps ``session_token``; by
            default what the ``AWS_…`` variables say.
        owner: This store's id as a holder of leases; by default one that nobody can guess.

    Raises:
        ConfigError: A value does not fit.

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
        place = BucketAddress(
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
            message = (
                f"credentials has no {min(unknown)!r}: it takes access_key_id, secret_access_key "
                "and session_token"
            )
            raise ConfigError(message, option="credentials")
        super().__init__(lambda: S3Bucket(place, secrets), location=str(place), owner=owner)

    @classmethod
    def at(cls, url: str) -> S3Store:
        """Return the store that a URL names, with credentials from the environment.

        Raises:
            ConfigError: The URL does not fit.

        """
        place = place_of(url.removeprefix("s3:"))
        return cls(
            place.bucket,
            place.prefix,
            endpoint=place.endpoint,
            allow_http=place.allow_http,
            region=place.region,
            timeout=place.timeout,
        )
