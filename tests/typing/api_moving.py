"""Moving sessions, as a type checker sees it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import perdure
from perdure import SessionKey
from perdure.transfer import (
    Migration,
    MigrationProgress,
    WrittenSession,
    migrate,
    read_bundle,
    write_bundle,
)


def show(progress: MigrationProgress) -> None:
    assert_type(progress.done, int)
    assert_type(progress.key, SessionKey)


async def move(folder: Path) -> None:
    source, target = perdure.store_for(folder), perdure.store_for("memory:")
    done = await migrate(source, target, tenants=["acme"], on_held="steal", progress=show)
    assert_type(done, Migration)
    assert_type(done.failed, dict[str, str])
    assert_type(await write_bundle(source, SessionKey("ada"), folder / "ada.jsonl"), int)
    assert_type(await read_bundle(target, folder / "ada.jsonl"), WrittenSession)
