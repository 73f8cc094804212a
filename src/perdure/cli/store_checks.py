"""Blobs that nothing reaches: counted by every whole check, removed when told to.

What was just put may not be named by a record yet: so nothing younger than the grace period goes,
and what goes is set aside first, and removed one grace period later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.cli.access import layers
from perdure.cli.audit import Audit
from perdure.cli.output import say
from perdure.errors import CorruptRecordError, PerdureError
from perdure.lineage.store import followed
from perdure.records.keys import SessionKey
from perdure.store import BlobSweep, Store
from perdure.transfer import receipts
from perdure.transfer.read import names_of


class Garbage(msgspec.Struct, kw_only=True):
    """What of a tenant's blobs nothing reaches."""

    tenant: str
    blobs: int = 0
    """All that can be read."""
    receipts: int = 0
    """Those by which a migration finds out what an earlier one did: they stay."""
    unreachable: int = 0
    unknown: str | None = None
    """Why it cannot be told: a session cannot be read, and may need any of them."""
    swept: BlobSweep | None = None
    """What was done about it."""


async def garbage(store: Store, tenant: str, keys: list[SessionKey]) -> tuple[Garbage, set[str]]:
    """Look for blobs that none of a tenant's sessions, which are *keys*, reaches."""
    reached: set[str] = set()
    try:
        names_there = set(await store.blob_names(tenant))
    except CorruptRecordError as error:
        return Garbage(tenant=tenant, unknown=str(error)), reached
    names = Garbage(tenant=tenant, blobs=len(names_there))
    if not names_there:
        return names, reached
    lineage = followed(store)
    for key in keys:
        try:
            documents = await lineage.read_documents(key)
            reached |= await names_of(store, key, documents, await store.head(key))
        except PerdureError as error:
            names.unknown = f"{key} cannot be read: {error}"
            return names, names_there
    reachable = await receipts.current(store, tenant, names_there - reached)
    names.receipts = len(reachable)
    reached |= reachable
    names.unreachable = len(names_there - reached)
    return names, reached


async def collect(store: Store, garbage_found: Garbage, reached: set[str], grace: float) -> None:
    """Set aside what nothing reaches, and remove what was set aside long enough ago."""
    if garbage_found.unknown is None:
        garbage_found.swept = await store.sweep(garbage_found.tenant, reached, grace)


# The file that a store keeps everything in: whether it is sound, and what is readable if not
#
# Of stores that can tell, which is SQLite's. The sessions are looked at one by one all the same.


TOLD = 5
"""Problems of the file that are told one by one."""


class Integrity(msgspec.Struct, kw_only=True):
    """What a look at the file as a whole has shown."""

    problems: list[str]
    """What SQLite's integrity_check says."""
    reindexed: bool = False
    """Whether its indexes were made anew."""
    left: list[str]
    """What is wrong with it now."""


async def mended(store: Store) -> list[str] | None:
    """Make the indexes of a store's file anew if that mends anything; the store is not open.

    Returns what was wrong; None for a store that has no such file.
    """
    layer: Any
    for layer in layers(store):
        if hasattr(layer, "reindex"):
            await layer.open_read_only()
            try:
                findings: list[str] = await layer.integrity_problems()
            finally:
                await layer.aclose()
            if findings:
                await layer.reindex()
            return findings
    return None


async def examined(store: Store, before: list[str] | None = None) -> Integrity | None:
    """Look at a store's file, behind a repair that has seen other problems before."""
    for layer in layers(store):
        look = getattr(layer, "integrity_problems", None)
        if look is not None:
            remaining: list[str] = await look()
            findings = remaining if before is None else before
            return Integrity(
                problems=findings, reindexed=len(remaining) < len(findings), left=remaining
            )
    return None


def print_integrity(
    integrity: Integrity, location: str, audits: Sequence[Audit], *, repair: bool
) -> None:
    """Say what is wrong with the file, what was done about it, and the way out."""
    for line in (integrity.left or integrity.problems)[:TOLD]:
        say(f"{location}: {'PROBLEM' if integrity.left else 'mended'}: file: {line}")
    if len(integrity.left) > TOLD:
        say(f"{location}: and {len(integrity.left) - TOLD} more problems of the file")
    if integrity.reindexed:
        say(f"{location}: the indexes were made anew from their tables (REINDEX)")
    if not integrity.left:
        return
    if not repair:
        say(
            f"{location}: `perdure check --repair` makes the indexes anew; damage elsewhere in the "
            "file stays"
        )
        return
    damaged = [str(audit.key) for audit in audits if audit.problems]
    count = f"{len(audits) - len(damaged)} of {len(audits)} sessions can be read in whole"
    lost = f"; not so: {', '.join(damaged)}" if damaged else ""
    say(
        f"{location}: REINDEX does not mend this. {count}{lost}. Restore the file from a copy; or "
        "take the sound ones over into a new store, by `perdure export ID --layout bundle --out "
        "FILE` and `perdure import FILE`"
    )
