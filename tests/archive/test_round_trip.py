"""Whatever tree is saved comes back as it was, from the store and from a file."""

from __future__ import annotations

import random
import string
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings, strategies as st

import perdure
import perdure.sync
from perdure.archive import Archives
from perdure.archive.limits import CHUNK_BYTES
from perdure.errors import MissingExtraError, NotStorableError
from tests.archive.trees import look, make

LETTERS = string.ascii_letters + string.digits + " _-()[]'\u00e9\u4e16\U0001f600=,;+~"
STEP = st.text(LETTERS, min_size=1, max_size=12) | st.sampled_from(["x" * 255, "a.b", "data"])
PATH = st.lists(STEP, min_size=1, max_size=4).map("/".join)
CONTENT = st.none() | st.binary(max_size=2000) | st.sampled_from([b"", b"\0" * CHUNK_BYTES])
TREE = st.dictionaries(PATH, CONTENT, max_size=12)


def fitting(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Leave out what one disk cannot have: a file where another one needs a folder."""
    kept: dict[str, bytes | None] = {}
    for path, content in sorted(tree.items()):
        above = [path.rsplit("/", n)[0] for n in range(1, path.count("/") + 1)]
        if all(kept.get(one, "folder") is None or one not in kept for one in above):
            kept[path] = content
    return kept


@settings(max_examples=12)
@given(first=TREE, second=TREE, suffix=st.sampled_from([".tar", ".tar.gz", ".tar.zst"]))
def test_any_tree_comes_back(
    first: dict[str, bytes | None], second: dict[str, bytes | None], suffix: str
) -> None:
    """S4-17: a snapshot of the home, whatever is in it; the next one replaces all of it."""
    with tempfile.TemporaryDirectory() as top:
        anyio.run(back_and_forth, Path(top), fitting(first), fitting(second), suffix)


async def back_and_forth(
    top: Path, first: dict[str, bytes | None], second: dict[str, bytes | None], suffix: str
) -> None:
    wanted = look(make(top / "one", first))
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        try:
            saved = await Archives(session, top / "one").save()
            await Archives(session, make(top / "two", second)).save()
        except NotStorableError:
            return  # two names that some disks cannot tell apart
        two = Archives(session, top / "two")
        before = look(top / "two")
        done = await two.restore(saved.archive.id)
        assert look(top / "two") == wanted
        assert done.changed == (wanted != before)
        await two.write(top / f"out{suffix}", saved.archive.id)
        await Archives(session, top / "three").read(top / f"out{suffix}")
        assert look(top / "three") == wanted
        assert not (await Archives(session, top / "three").restore(saved.archive.id)).changed


async def test_a_large_tree_and_a_large_file_come_back(tmp_path: Path) -> None:
    """More entries than a hop or a page has, and a file of several chunks that ends within one."""
    many = {f"d{n % 7}/{n:05}.txt": f"{n}".encode() for n in range(700)}
    large = random.Random(4).randbytes(5 * CHUNK_BYTES + 123)
    home = make(tmp_path / "home", {**many, "large": large})
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        seen: list[tuple[int, int]] = []
        archives = Archives(session, home)
        saved = await archives.save(progress=lambda one: seen.append((one.files, one.bytes)))
        assert seen[-1] == (saved.archive.files, saved.archive.bytes) == (701, saved.stored_bytes)
        new = Archives(session, tmp_path / "new")
        await new.restore(
            progress=lambda one: seen.append((one.files, one.total_bytes or 0))  # as it goes on
        )
        assert seen[-1] == (701, saved.archive.bytes)
        await archives.write(tmp_path / "out.tar")
        await Archives(session, tmp_path / "other").read(
            tmp_path / "out.tar", progress=lambda one: seen.append((one.files, one.bytes))
        )
        assert seen[-1] == (701, saved.archive.bytes)
    assert look(tmp_path / "new") == look(tmp_path / "other") == look(home)


def test_blocking_code_has_archives_too(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a": "1"})
    with perdure.sync.connect(f"file:{tmp_path}/store") as sessions:
        with sessions.open("agent") as session:
            archives = perdure.sync.Archives(session, home)
            saved = archives.save(label="one")
            assert archives.all() == [archives.latest()] == [archives.find("one")]
            (home / "a").write_text("2")
            assert archives.restore().changed
            assert not archives.resume().changed
            assert archives.verify() == saved.archive
            archives.write(tmp_path / "out.tar")
            archives.read(tmp_path / "out.tar")
            assert archives.home == str(home)
    assert look(home) == {"a": b"1"}


async def test_without_zstandard_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make(tmp_path / "home", {"a": "1"})
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        archives = Archives(session, home)
        await archives.save()
        await archives.write(tmp_path / "out.tar.zst")
        monkeypatch.setitem(sys.modules, "zstandard", None)
        for act, path in ((archives.write, "new.tar.zst"), (archives.read, "out.tar.zst")):
            with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[compression\]'"):
                await act(tmp_path / path)
        await archives.write(tmp_path / "out.tar.gz")
        await archives.read(tmp_path / "out.tar.gz")
    assert not (tmp_path / "new.tar.zst").exists()
