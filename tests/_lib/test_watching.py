"""Being told of what is put into a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from perdure._lib.files import Folder, watch_folder

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of changes by inotify"),
]


async def test_a_file_that_is_put_there_is_told_of_once(tmp_path: Path) -> None:
    watch = watch_folder(str(tmp_path))
    assert watch is not None
    with Folder.root(str(tmp_path)) as folder, anyio.fail_after(60):
        folder.replace("a", b"1", durable=False)
        await watch.wait()
        watch.drain()
        with anyio.move_on_after(0.05) as scope:
            await watch.wait()
        assert scope.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.wait)
            folder.replace("b", b"1", durable=False)
    watch.close()
    watch.close()
    await watch.wait()


async def test_whoever_waits_is_woken_by_the_end(tmp_path: Path) -> None:
    watch = watch_folder(str(tmp_path))
    assert watch is not None
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.wait)
            await anyio.wait_all_tasks_blocked()
            watch.close()


async def test_there_is_no_watch_where_there_is_no_folder(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert watch_folder(str(tmp_path / "none")) is None
    (tmp_path / "file").write_bytes(b"")
    assert watch_folder(str(tmp_path / "file")) is None
    assert len(os.listdir("/proc/self/fd")) <= before  # a thread of before may close one
