"""Every backend as a URL for a test's folder, with what a process of its own needs to use it.

Servers are started once in a process, when they are first asked for.
"""

from __future__ import annotations

from pathlib import Path

import perdure
from perdure.store import Store
from tests.servers import postgres, s3, valkey

BACKENDS = ("file", "sqlite", "postgres", "redis", "s3")
SEALED = ("encrypted+file", "encrypted+sqlite")
ALL = (*BACKENDS, *SEALED)
EACH = (*BACKENDS, SEALED[-1])
"""Each store once, and the wrapper once: for what it does with names and records, not with files."""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": s3.ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": s3.SECRET_KEY,
    "PERDURE_KEY": "5a" * 32,
}


def url_of(kind: str, place: Path) -> str:
    """Return the URL of a store that belongs to one folder."""
    around, plus, kind = kind.rpartition("+")
    name = s3.prefix_of(place)
    match kind:
        case "file":
            url = f"file:{place / 'files'}"
        case "sqlite":
            url = f"sqlite:///{place / 'sqlite' / 'store.db'}"
        case "postgres":
            url = f"{postgres.shared().url}?schema={postgres.schema_of(place)}"
        case "redis":
            url = f"{valkey.shared().url}?prefix={name}"
        case _:
            url = s3.shared().url(name)
    if around == "compressed":
        return f"{url}{'&' if '?' in url else '?'}compression=zstd"
    return around + plus + url


def store_of(kind: str, place: Path) -> Store:
    """Return a new store object at that URL, an owner of its own; not open yet."""
    return perdure.store_for(url_of(kind, place))
