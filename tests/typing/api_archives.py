"""Archives of an agent's files, as users would use them. It is checked, never run."""

# pyright: strict
from __future__ import annotations

from pathlib import Path
from typing import assert_type

import perdure.sync
from perdure import Session, SessionView
from perdure.agent import Agent
from perdure.archive import (
    Archive,
    ArchiveLimits,
    ArchiveProgress,
    ArchiveRestored,
    Archives,
    ArchiveSaved,
    ArchiveSkipped,
)


def shown(progress: ArchiveProgress) -> None:
    assert_type((progress.files, progress.bytes), tuple[int, int])
    assert_type((progress.total_files, progress.total_bytes), tuple[int | None, int | None])


async def of_a_session(session: Session, view: SessionView) -> None:
    archives = Archives(
        session,
        Path("home"),
        paths=["data/", ".config/"],
        whole=False,
        limits=ArchiveLimits(total_bytes=10**9),
        wait=5.0,
    )
    assert_type(archives.home, str | None)
    saved = await archives.save(label="before", keep=3, progress=shown)
    assert_type(saved, ArchiveSaved)
    assert_type((saved.new, saved.stored_bytes), tuple[bool, int])
    assert_type(saved.skipped, tuple[ArchiveSkipped, ...])
    assert_type([(one.path, one.why) for one in saved.skipped], list[tuple[str, str]])
    assert_type(await archives.all(), list[Archive])
    assert_type(await archives.latest(), Archive | None)
    assert_type(await archives.find("before"), Archive)
    done = await archives.restore("before", force=True, progress=shown)
    assert_type(done, ArchiveRestored)
    assert_type((done.changed, done.replaced, done.kept), tuple[bool, tuple[str, ...], str])
    assert_type(await archives.resume(), ArchiveRestored)
    assert_type((await archives.verify()).id, str)
    assert_type(await Archives(view).write("out.tar.zst"), int)
    assert_type(await archives.read(Path("out.tar.zst")), ArchiveRestored)


async def of_an_agent(agent: Agent) -> None:
    assert_type(agent.archives, Archives)


def blocking(session: perdure.sync.Session) -> None:
    archives = perdure.sync.Archives(session)
    assert_type(archives.save().archive, Archive)
    assert_type(archives.restore().archive, Archive | None)
