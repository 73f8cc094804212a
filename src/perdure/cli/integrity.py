"""The file that a store keeps everything in: whether it is sound, and what is readable if not.

Of stores that can tell, which is SQLite's. The sessions are looked at one by one all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.cli.audit import Audit
from perdure.cli.output import say
from perdure.cli.reach import layers
from perdure.store import Store

__all__ = ["Integrity", "examined", "mended", "print_integrity"]

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
                found: list[str] = await layer.integrity_problems()
            finally:
                await layer.aclose()
            if found:
                await layer.reindex()
            return found
    return None


async def examined(store: Store, before: list[str] | None = None) -> Integrity | None:
    """Look at a store's file, behind a repair that has seen other problems before."""
    for layer in layers(store):
        look = getattr(layer, "integrity_problems", None)
        if look is not None:
            left: list[str] = await look()
            found = left if before is None else before
            return Integrity(problems=found, reindexed=len(left) < len(found), left=left)
    return None


def print_integrity(
    seen: Integrity, location: str, audits: Sequence[Audit], *, repair: bool
) -> None:
    """Say what is wrong with the file, what was done about it, and the way out."""
    for line in (seen.left or seen.problems)[:TOLD]:
        say(f"{location}: {'PROBLEM' if seen.left else 'mended'}: file: {line}")
    if len(seen.left) > TOLD:
        say(f"{location}: and {len(seen.left) - TOLD} more problems of the file")
    if seen.reindexed:
        say(f"{location}: the indexes were made anew from their tables (REINDEX)")
    if not seen.left:
        return
    if not repair:
        say(
            f"{location}: `perdure check --repair` makes the indexes anew; damage elsewhere in the "
            "file stays"
        )
        return
    damaged = [str(one.key) for one in audits if one.problems]
    count = f"{len(audits) - len(damaged)} of {len(audits)} sessions can be read in whole"
    lost = f"; not so: {', '.join(damaged)}" if damaged else ""
    say(
        f"{location}: REINDEX does not mend this. {count}{lost}. Restore the file from a copy; or "
        "take the sound ones over into a new store, by `perdure export ID --layout bundle --out "
        "FILE` and `perdure import FILE`"
    )
