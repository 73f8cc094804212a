"""A bucket of S3, or of a service like it: each call is one request, with a deadline."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

from perdure.errors import MissingExtraError
from perdure.stores.objects.bucket import Bucket, Found, Listed
from perdure.stores.s3.options import Place, require_encrypted
from perdure.stores.s3.trouble import missing_bucket, trouble

__all__ = ["S3Bucket"]

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

    def __init__(self, place: Place, credentials: dict[str, str]) -> None:
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

    def get(self, name: str) -> Found | None:
        """Return an object, None if there is none."""
        try:
            answer = self._obs.get(self._reads, self._prefix + name)
            return Found(bytes(answer.bytes()), answer.meta["e_tag"] or "")
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

    def stat(self, name: str) -> Listed | None:
        """Return an object's size and age, None if there is none."""
        try:
            meta = self._obs.head(self._reads, self._prefix + name)
        except self._errors as error:
            self._require_gone(error, f"look at {name} of")
            return None
        return self._one(meta)

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[Listed]]:
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

    def _one(self, meta: Any) -> Listed:
        name = meta["path"].removeprefix(self._prefix)
        tag = meta["e_tag"] or ""
        return Listed(name, meta["size"], meta["last_modified"].timestamp(), tag)


def _gone(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) and not missing_bucket(error)


def _client(place: Place, credentials: dict[str, str], *, retries: int) -> Any:
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
