"""Takers of a file store's session that get into each other's way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.records.keys import SessionKey
from perdure.store import take_after
from perdure.stores.file import FileStore

KEY = SessionKey("agent")


async def test_a_taker_whose_file_was_tidied_away_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link
    tidied: list[str] = []

    def link(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if not tidied:  # as the holder below does at the end of its own acquire
            tidied.append(source)
            os.unlink(source, dir_fd=src_dir_fd)
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    store = FileStore(tmp_path / "root")
    await store.open()
    assert (await take_after(store, KEY, after=0)).epoch == 1
    monkeypatch.setattr(os, "link", link)
    assert (await take_after(store, KEY, after=1)).epoch == 2
    assert len(tidied) == 1
    await store.aclose()
