"""The store conformance suite: what a backend must do to be a store, as tests.

It defines the port in `perdure.store`. The author of a backend subclasses
`StoreConformance` in a test module and says how to make a store; pytest with anyio's
plugin does the rest, on each loop that the ``anyio_backend`` fixture names:

    from pathlib import Path
    from perdure.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        def make_store(self, place: Path, owner: str) -> Store:
            return MyStore(place / "data.db", owner=owner)

Stores made with the same ``place`` must share what they keep, as two processes would.
Each part is a class of its own, for a backend that is not finished: `LogConformance`,
`ReaderConformance`, `DocumentConformance`, `LeaseConformance`, `BlobConformance`,
`DirectoryConformance`, `InboxConformance`, `DeadLetterConformance`,
`TrimConformance`, `BeginningConformance`, `DraftConformance`, `DraftInboxConformance`,
`CancellationConformance`.

What a backend keeps through a killed process or a cut of power is not tested here:
that takes processes, and knowledge of where the backend writes.
"""

from __future__ import annotations

import pytest

_PARTS = (
    "inbox",
    "_kit",
    "log",
    "documents",
    "drafts",
    "leases",
)
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from perdure.testing.conformance.documents import (  # noqa: E402
    BlobConformance,
    DirectoryConformance,
    DocumentConformance,
)
from perdure.testing.conformance.drafts import (  # noqa: E402
    BeginningConformance,
    DraftConformance,
    DraftInboxConformance,
)
from perdure.testing.conformance.inbox import (  # noqa: E402
    DeadLetterConformance,
    InboxConformance,
)
from perdure.testing.conformance.leases import LeaseConformance  # noqa: E402
from perdure.testing.conformance.log import (  # noqa: E402
    CancellationConformance,
    LogConformance,
    ReaderConformance,
    TrimConformance,
)

__all__ = [
    "BeginningConformance",
    "BlobConformance",
    "CancellationConformance",
    "DeadLetterConformance",
    "DirectoryConformance",
    "DocumentConformance",
    "DraftConformance",
    "DraftInboxConformance",
    "InboxConformance",
    "LeaseConformance",
    "LogConformance",
    "ReaderConformance",
    "StoreConformance",
    "TrimConformance",
]


class StoreConformance(
    LogConformance,
    ReaderConformance,
    DocumentConformance,
    LeaseConformance,
    InboxConformance,
    DeadLetterConformance,
    BlobConformance,
    DirectoryConformance,
    TrimConformance,
    BeginningConformance,
    DraftConformance,
    DraftInboxConformance,
    CancellationConformance,
):
    """Every part of the suite. Subclass it and override ``make_store``."""
