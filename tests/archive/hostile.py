"""Archives that somebody made to do harm: what they are called, and their bytes.

A file that perdure wrote begins with a manifest. So each trick is tried in three ways, as far as it
goes: in the manifest and in the tar, in the tar behind an innocent manifest, and in a plain
tar without any.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

MANIFEST = ".perdure/archive.jsonl"
DATA = b"the file's bytes"


def file(path: str, data: bytes = DATA, **other: Any) -> dict[str, Any]:
    line = {"is": "file", "path": path, "size": len(data), "mode": 0o600, "mtime": 0}
    return {**line, "sha256": hashlib.sha256(data).hexdigest(), **other}


def folder(path: str, **other: Any) -> dict[str, Any]:
    return {"is": "folder", "path": path, "mode": 0o700, **other}


def member(path: str, data: bytes = DATA, kind: bytes = b"0", link: str = "") -> bytes:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = kind, link
    info.size = len(data) if kind in (b"0", b"\0", b"S") else 0
    return info.tobuf(tarfile.PAX_FORMAT) + (padded(data) if info.size else b"")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def manifest(*lines: dict[str, Any], head: dict[str, Any] | None = None) -> bytes:
    first = {"perdure_archive": 1, "entries": len(lines), **(head or {})}
    text = b"".join(json.dumps(line).encode() + b"\n" for line in (first, *lines))
    return member(MANIFEST, text)


def whole(*parts: bytes) -> bytes:
    return b"".join(parts) + bytes(1024)


def of(*lines: dict[str, Any], head: dict[str, Any] | None = None) -> bytes:
    """Return an archive whose manifest and members agree."""
    members = [
        member(line["path"], b"", b"5") if line["is"] == "folder" else member(line["path"])
        for line in lines
    ]
    return whole(manifest(*lines, head=head), *members)


def behind(*members: bytes, lines: tuple[dict[str, Any], ...] = ()) -> bytes:
    """Return an archive whose manifest lists a harmless file where something else comes."""
    return whole(manifest(*(lines or (file("a.txt"),))), *members)


def extended(path: str, pairs: bytes, data: bytes = DATA) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = b"x", len(pairs)
    return info.tobuf(tarfile.USTAR_FORMAT) + padded(pairs) + member(path, data)


def pair(text: str) -> bytes:
    size = len(text.encode()) + 2
    size += len(str(size + len(str(size))))
    return f"{size} {text}\n".encode()


def names() -> Iterator[tuple[str, str]]:
    yield "traversal", "../evil"
    yield "traversal inside", "data/../../evil"
    yield "absolute", "/tmp/perdure-evil"
    yield "two slashes", "//evil"
    yield "empty step", "data//evil"
    yield "dot", "./evil"
    yield "dot dot alone", ".."
    yield "empty", ""
    yield "backslash", "..\\evil"
    yield "NUL", "evil\0.txt"
    yield "control", "evil\x1b[2J"
    yield "surrogate", "evil\udcff"
    yield "long name", "e" * 256
    yield "long path", "/".join(["e" * 100] * 30)
    yield "deep", "/".join("e" * 70)
    yield "own folder", ".perdure/restoring.json"
    yield "own folder in capitals", ".PERDURE/restoring.json"
    yield "hidden", ".bashrc"
    yield "hidden below", "data/.ssh"


def in_folders(path: str) -> list[dict[str, Any]]:
    """Return a file with the folders that it needs."""
    steps = path.split("/")
    above = ["/".join(steps[:at]) for at in range(1, len(steps))]
    return [*(folder(one) for one in above if one), file(path)]


def links() -> Iterator[tuple[str, bytes]]:
    for what, kind, target in (
        ("symlink out", b"2", "/etc"),
        ("symlink up", b"2", "../.."),
        ("symlink inside", b"2", "b.txt"),
        ("hard link out", b"1", "/etc/passwd"),
        ("hard link up", b"1", "../outside/secret"),
    ):
        yield what, member("a.txt", kind=kind, link=target)
        yield (
            f"{what}, then a file through it",
            member("a.txt", kind=kind, link=target) + member("a.txt/evil"),
        )
    yield "character device", member("a.txt", kind=b"3")
    yield "block device", member("a.txt", kind=b"4")
    yield "pipe", member("a.txt", kind=b"6")
    yield "contiguous file", member("a.txt", kind=b"7")
    yield "sparse file", member("a.txt", kind=b"S")
    yield "unknown kind", member("a.txt", kind=b"Z")
    yield "header for all", member("a.txt", kind=b"g")
    yield "long link", member("a.txt", kind=b"K")


def long_links() -> bytes:
    """The class of CVE-2025-4517: links whose resolved path is longer than the system follows."""
    parts, path = [], ""
    for step in "abcdefghijklmnop":
        inner = "d" * 247
        parts.append(member(f"{path}{inner}", kind=b"5"))
        parts.append(member(f"{path}{step}", kind=b"2", link=inner))
        path += f"{inner}/"
    short = "/".join("abcdefghijklmnop")
    parts.append(member(f"{short}/{'l' * 254}", kind=b"2", link="../" * 16))
    parts.append(member("escape", kind=b"2", link=f"{short}/{'l' * 254}/../outside"))
    return b"".join([*parts, member("escape/evil")])


def manifests() -> Iterator[tuple[str, bytes]]:
    yield "twice", of(file("a.txt"), file("a.txt"))
    yield "file and folder", of(folder("a"), file("a"))
    yield "case", of(file("A.txt"), file("a.txt"))
    yield "case of a folder", of(folder("Data"), folder("data"))
    yield "sharp s", of(file("stra\u00dfe"), file("STRASSE"))
    yield "NFC and NFD", of(file("caf\u00e9"), file("cafe\u0301"))
    yield "no folder for it", of(file("data/a.txt"))
    yield "a file for its folder", of(file("data"), file("data/a.txt"))
    yield "a folder behind its file", of(file("data/a.txt"), folder("data"))
    yield "set-user-id", of(file("a.txt", mode=0o4755))
    yield "writable by all", of(file("a.txt", mode=0o777))
    yield "sticky folder", of(folder("a", mode=0o1700))
    yield "negative size", of(file("a.txt", size=-1))
    yield "no hash", of(file("a.txt", sha256="x"))
    yield "chunks", of(file("a.txt", chunks=["0" * 64]))
    yield "a time beyond all", of(file("a.txt", mtime=2**63))
    yield "wrong hash", of(file("a.txt", sha256="0" * 64))
    yield "an unknown kind", of(file("a.txt"), {"is": "link", "path": "b"})
    yield "no JSON", whole(member(MANIFEST, b"{}\n"), member("a.txt"))
    yield "not UTF-8", whole(member(MANIFEST, b'{"perdure_archive":1,"entries":"\xff"}\n'))
    yield "no line break", whole(member(MANIFEST, b'{"perdure_archive":1,"entries":0}'))
    yield "more entries than said", of(file("a.txt"), head={"entries": 0})
    yield "fewer entries than said", of(file("a.txt"), head={"entries": 2})
    yield "paths that leave", of(file("a.txt"), head={"paths": ["../x"]})
    yield "a newer format", of(file("a.txt"), head={"perdure_archive": 2})
    yield "a file that its paths leave out", of(file("a.txt"), head={"whole": False})


def tars() -> Iterator[tuple[str, bytes]]:
    good = of(file("a.txt"))
    yield "another name than listed", behind(member("b.txt"))
    yield "longer than listed", behind(member("a.txt", DATA + b"!"))
    yield "shorter than listed", behind(member("a.txt", DATA[:-1]))
    yield "other bytes", behind(member("a.txt", DATA[::-1]))
    yield "a folder in place of a file", behind(member("a.txt", b"", b"5"))
    yield "more than listed", behind(member("a.txt"), member("b.txt"))
    yield "twice in the tar", behind(member("a.txt"), member("a.txt"))
    yield "less than listed", whole(manifest(file("a.txt"), file("b.txt")), member("a.txt"))
    yield "a file like a folder", behind(member("a.txt/"))
    yield "path hidden in a header", behind(extended("a.txt", pair("path=../evil")))
    yield "link in a header", behind(extended("a.txt", pair("linkpath=/etc/passwd")))
    yield "attributes", behind(extended("a.txt", pair("SCHILY.xattr.user.x=y")))
    yield "sparse header", behind(extended("a.txt", pair("GNU.sparse.major=1")))
    yield "size in a header", behind(extended("a.txt", pair("size=99999999999")))
    yield "negative size in a header", behind(extended("a.txt", pair("size=-1")))
    yield "size in other digits", behind(extended("a.txt", pair("size=\u0661")))
    yield "a damaged header", behind(extended("a.txt", b"99999 path=a\n"))
    yield "a header twice", behind(extended("a.txt", pair("path=a.txt"), b"")[:1024] * 2)
    yield "a huge header", behind(extended("a.txt", pair("comment=" + "x" * 70_000)))
    yield "truncated", good[:-1500]
    yield "truncated in the manifest", good[:700]
    yield "no end", good[:-1024]
    yield "half an end", good[:-512]
    yield "more behind the end", good + member("evil")
    yield "endless zeros", good + bytes(2 * 1024 * 1024)
    yield "no tar", b"PK\x03\x04" + bytes(2000)
    yield "empty", b""
    yield "only zeros", bytes(10_240)
    yield "a wrong checksum", good[:3] + b"X" + good[4:]
    yield "two manifests", whole(manifest(file("a.txt")), manifest(file("a.txt")))
    yield "links longer than a path", behind(long_links())
    packed = zstandard.compress(good)
    yield "truncated zstd", packed[:-20]
    yield "flipped zstd", packed[:40] + bytes([packed[40] ^ 0x10]) + packed[41:]
    squeezed = gzip.compress(good)
    yield "truncated gzip", squeezed[:-20]
    yield "flipped gzip", squeezed[:60] + bytes([squeezed[60] ^ 0x10]) + squeezed[61:]
    yield "more behind gzip", squeezed + gzip.compress(b"more")


def plain() -> bytes:
    """Return a tar as `tarfile` makes it, without a manifest."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = len(DATA)
        tar.addfile(info, io.BytesIO(DATA))
    return made.getvalue()


def safe(build: Callable[[], bytes]) -> bytes | None:
    """Return what can be built: some names cannot be in a tar's header at all."""
    try:
        return build()
    except (UnicodeError, ValueError):
        return None


def corpus() -> dict[str, bytes]:
    """Return all of them by name."""
    found: dict[str, bytes | None] = {"no manifest": plain()}
    for what, path in names():
        lines = in_folders(path)
        found[f"name: {what}"] = safe(lambda lines=lines: of(*lines)) or whole(manifest(*lines))
        found[f"name in the tar: {what}"] = safe(lambda path=path: behind(member(path)))
    for what, data in links():
        found[f"in the tar: {what}"] = behind(data)
        found[f"in the tar, behind the listed file: {what}"] = behind(member("a.txt"), data)
        found[f"first of all: {what}"] = whole(data)
    found |= {f"manifest: {what}": data for what, data in manifests()}
    found |= {f"tar: {what}": data for what, data in tars()}
    return {what: data for what, data in found.items() if data is not None}
