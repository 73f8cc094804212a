"""The S3 store: an object store on a bucket of S3, for any number of servers.

Any service that knows conditional writes (If-None-Match, If-Match) will do; ``open`` tries them
out and refuses one that ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from perdure.errors import ConfigError
from perdure.stores.objects import ObjectStore
from perdure.stores.s3.bucket import S3Bucket
from perdure.stores.s3.options import Place, place_of

__all__ = ["S3Store"]

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
        place = Place(
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
