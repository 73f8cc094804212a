"""What a service must be able to do, tried out: conditional writes.

Some services take If-None-Match or If-Match and do nothing with them. On these, two holders could
write at one place and both be told that it was done; so the store refuses to open.
"""

from __future__ import annotations

from perdure._lib.ids import random_id
from perdure.errors import ConfigError
from perdure.stores.objects.bucket import Bucket

__all__ = ["require_conditions"]


def require_conditions(bucket: Bucket, where: str) -> None:
    """Try conditional writes on an object of its own.

    Raises:
        ConfigError: The service ignores a condition.
        StoreUnavailableError: It cannot be reached or written.

    """
    name = f"probe/{random_id()}"
    tag = bucket.create(name, b"1")
    try:
        ignored = None
        if tag is None or bucket.create(name, b"2") is not None:
            ignored = "If-None-Match"
        elif not tag or bucket.replace(name, b"3", tag) is None:
            ignored = "If-Match (it refuses the object's own ETag)"
        elif bucket.replace(name, b"4", tag) is not None:
            ignored = "If-Match"
    finally:
        bucket.remove([name])
    if ignored is not None:
        message = (
            f"{where} does not keep to conditional writes ({ignored}), so it cannot keep two "
            "writers apart: use a service, or a newer release of it, that does"
        )
        raise ConfigError(message, condition=ignored, path=where)
