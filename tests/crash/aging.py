"""Time that passes for the blobs of a store: a day, at once.

A sweep takes what has lain about for long enough, and only what nobody has renewed since. So a run that
lasts seconds can neither wait, nor give a grace of no time. What happens meanwhile stays young.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from tests.crash import places

DAY = 86_400.0


def age(root: Path, *, only_set_aside: bool) -> None:
    """Make blobs a day older: those that a sweep has set aside, or all of them.

    While others write, only the former: it is done at once for each, and not to what is renewed.
    """
    {"file": _file, "sqlite": _sqlite, "postgres": _postgres, "redis": _redis}[places.chosen()](
        root, only_set_aside
    )


def _file(root: Path, only_set_aside: bool) -> None:
    for blobs in root.rglob("blobs"):
        if not only_set_aside:
            for found in [found for found in blobs.rglob("*") if found.is_file()]:
                os.utime(found, times=(found.stat().st_atime - DAY, found.stat().st_mtime - DAY))
        # What is set aside is that old anyway: a sweep has moved it, and it was renewed before.
        for moved in blobs.glob("quarantine/*"):
            moved.rename(moved.with_name(str(int(moved.name) - int(DAY * 1000))))


def _sqlite(root: Path, only_set_aside: bool) -> None:
    with sqlite3.connect(root / "store.db", timeout=60) as con:
        con.execute("UPDATE blob SET moved_at = moved_at - ?", (DAY,))
        if not only_set_aside:
            con.execute("UPDATE blob SET renewed_at = renewed_at - ?", (DAY,))
    con.close()


def _postgres(root: Path, only_set_aside: bool) -> None:
    from tests.servers.postgres import schema_of, shared

    server, blobs = shared(fsync=True), f'"{schema_of(root)}".blobs'
    server.run(f"UPDATE {blobs} SET quarantined = quarantined - interval '1 day'")
    if not only_set_aside:
        server.run(f"UPDATE {blobs} SET renewed = renewed - interval '1 day'")


_AGED = """
local found = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for at = 1, #found, 2 do
  redis.call('ZADD', KEYS[1], string.format('%.6f', tonumber(found[at + 1]) - ARGV[1]), found[at])
end
"""


def _redis(root: Path, only_set_aside: bool) -> None:
    from tests.servers.valkey import shared

    for digit in "0123456789abcdef":
        for shelf in ("away",) if only_set_aside else ("ages", "away"):
            name = f"{root.parent.name}:{{#:{digit}}}:{shelf}"
            shared().say("EVAL", _AGED, "1", name, str(int(DAY)))
