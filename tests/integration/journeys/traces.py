"""Where a word can be found in what a backend keeps on its disk, server files included."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.servers import postgres, s3, valkey


def folder_of(kind: str, place: Path) -> Path:
    """Return where a backend keeps what is stored for one folder: the server's, if there is one."""
    match kind.rpartition("+")[2]:
        case "postgres":
            return postgres.shared().data
        case "redis":
            return valkey.shared().folder
        case "s3":
            return s3.shared().folder / "data"
        case _:
            return place


def traces(kind: str, place: Path, word: str) -> list[str]:
    """Return the files that hold a word, relative to the backend's folder."""
    top = folder_of(kind, place)
    wanted = word.encode()
    found = []
    for path in sorted(top.rglob("*")):
        with suppress(FileNotFoundError):  # a server at work has just removed it
            if path.is_file() and wanted in path.read_bytes():
                found.append(path.relative_to(top).as_posix())
    return found


def objects(kind: str, place: Path, word: str) -> list[str]:
    """Return the objects of a bucket that hold a word, as anybody can read them."""
    if kind != "s3":
        return []
    client = s3.shared().client(s3.prefix_of(place))
    names = [one["path"] for page in client.list() for one in page]
    return [name for name in names if word.encode() in bytes(client.get(name).bytes())]


def is_found(kind: str, place: Path, word: str) -> bool:
    """Whether a word can be read, from the server or from its files, which it may write later."""
    return bool(objects(kind, place, word) or traces(kind, place, word))
