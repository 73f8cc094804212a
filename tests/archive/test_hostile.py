"""Archives that somebody made to do harm are refused, and change nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import zstandard

import perdure
from perdure.archive import ArchiveLimits, Archives
from perdure.errors import CorruptRecordError, FormatError, PerdureError, TooLargeError
from tests.archive import hostile
from tests.archive.trees import look, make

USUAL = ArchiveLimits()
OLD = {"data/notes.txt": "what was there", "data/empty": None, ".bashrc": "mine"}


async def read(top: Path, path: Path, limits: ArchiveLimits = USUAL) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        archives = Archives(session, top / "home", limits=limits)
        await archives.save()
        await archives.read(path)


def prepared(tmp_path: Path) -> Path:
    make(tmp_path / "top" / "home", OLD)
    make(tmp_path / "top" / "outside", {"secret": "not to be touched"})
    return tmp_path / "top"


async def refused(tmp_path: Path, data: bytes, limits: ArchiveLimits = USUAL) -> str:
    """Try a file; return why it is refused, having seen that nothing was changed."""
    top = prepared(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(data)
    before = look(top)
    try:
        await read(top, path, limits)
    except FormatError as error:
        message = str(error)
    except TooLargeError as error:
        message = str(error)
    else:
        return ""
    left = {
        name: value for name, value in look(top).items() if not name.startswith("home/.perdure")
    }
    assert left == before
    assert sorted(one.name for one in (top / "home/.perdure").iterdir()) == ["home.json", "lock"]
    assert not Path("/tmp/perdure-evil").exists()
    return message


@pytest.mark.deep
async def test_every_hostile_file_is_refused_and_nothing_is_changed(
    tmp_path: Path, anyio_backend: str
) -> None:
    """S4-17, S4-G7: (2.4) absolute names, `..`, links and the like in a tar; RELIABILITY S8."""
    accepted, vague = [], []
    for number, (what, data) in enumerate(hostile.corpus().items()):
        message = await refused(tmp_path / str(number), data)
        if not message:
            accepted.append(what)
        elif "nothing was changed" not in message and "newer release" not in message:
            vague.append((what, message))
    assert accepted == []
    assert vague == []
    assert number > 100


async def test_the_same_file_without_a_trick_is_restored(tmp_path: Path) -> None:
    top = prepared(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(hostile.of(hostile.folder("data"), hostile.file("data/a.txt")))
    await read(top, path)
    assert look(top / "home") == {".bashrc": b"mine", "data": None, "data/a.txt": hostile.DATA}


@pytest.mark.parametrize(
    ("option", "limits"),
    [
        ("file_bytes", ArchiveLimits(file_bytes=10)),
        ("total_bytes", ArchiveLimits(total_bytes=20)),
        ("entries", ArchiveLimits(entries=1)),
        ("depth", ArchiveLimits(depth=1)),
        ("name_bytes", ArchiveLimits(name_bytes=4)),
        ("path_bytes", ArchiveLimits(path_bytes=8)),
    ],
)
async def test_what_is_over_a_limit_is_refused_before_it_is_written(
    tmp_path: Path, option: str, limits: ArchiveLimits
) -> None:
    lines = (hostile.folder("data"), hostile.file("data/a.txt"), hostile.file("data/b.txt"))
    make(tmp_path / "top" / "home", {})
    path = tmp_path / "file"
    path.write_bytes(hostile.of(*lines))
    with pytest.raises(PerdureError, match=f"ArchiveLimits.{option}") as caught:
        await read(tmp_path / "top", path, limits)
    assert "nothing was changed" in str(caught.value)
    assert look(tmp_path / "top" / "home") == {}


def test_a_bomb_is_given_up_where_it_grows_out_of_proportion(tmp_path: Path) -> None:
    """RELIABILITY S9: the ratio is looked at while it is read; memory stays flat."""
    from perdure.archive.tar import LOOKED_AT, DecompressedFile

    packer = zstandard.ZstdCompressor().compressobj()
    path = tmp_path / "bomb"
    with path.open("wb") as file:
        for _ in range(LOOKED_AT // 2**20 + 64):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())
    assert path.stat().st_size < LOOKED_AT / 1000
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            unpacked = DecompressedFile(file, str(path), ArchiveLimits())
            with pytest.raises(TooLargeError, match="ArchiveLimits.ratio"):
                while unpacked.read(2**20):
                    pass
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


async def test_a_bomb_of_declared_sizes_is_refused_by_the_manifest(tmp_path: Path) -> None:
    """RELIABILITY S9: what a manifest declares is judged before a byte is written."""
    lines = [hostile.file(f"{n}", size=2**40) for n in range(3)]
    assert "ArchiveLimits(file_bytes=" in await refused(tmp_path, hostile.of(*lines))


async def test_what_the_disk_has_no_room_for_is_refused_before(tmp_path: Path) -> None:
    size = 2**60
    line = hostile.file("a.txt", size=size)
    make(tmp_path / "top" / "home", {})
    path = tmp_path / "file"
    path.write_bytes(hostile.of(line))
    limits = ArchiveLimits(file_bytes=2**62, total_bytes=2**62)
    with pytest.raises(perdure.StoreUnavailableError, match="make room"):
        await read(tmp_path / "top", path, limits)
    assert look(tmp_path / "top" / "home") == {}


@pytest.mark.deep
async def test_every_flipped_byte_is_noticed(tmp_path: Path, anyio_backend: str) -> None:
    """A flip in a name, a size, a hash or the contents; one that changes nothing restores it all."""
    if anyio_backend == "trio":
        return  # the same blocking code, thousands of times
    good = hostile.of(hostile.folder("data"), hostile.file("data/a.txt"))
    path = tmp_path / "file"
    wanted = {"data": None, "data/a.txt": hostile.DATA}
    refusals = 0
    make(tmp_path / "home", {})
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        archives = Archives(session, tmp_path / "home")
        await archives.save()
        for at in range(0, len(good), 37):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
            before = look(tmp_path / "home")
            try:
                await archives.read(path)
            except (CorruptRecordError, perdure.UnsupportedVersionError):
                refusals += 1
                assert look(tmp_path / "home") == before
            else:
                assert look(tmp_path / "home") == wanted, at
    assert refusals > 40
