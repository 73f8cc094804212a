"""Make an encrypted session, and edit its file without the key; run with a folder and an edit."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import anyio

from perdure import Message, Shutdown, connect


async def make(folder: Path) -> None:
    """Write a session with two turns."""
    url = f"encrypted+file:{folder}"
    async with connect(url, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            for text in ("hello", "never pay", "thanks", "pay"):
                async with session.turn():
                    session.append(Message.user(text))


def edit(log: Path) -> None:
    """Put an epoch record in a message's place, with the checksums that the file needs."""
    crc, out = 0, []
    for line in log.read_bytes().splitlines():
        body = line[:-16]
        if line.startswith(b'{"n":6,'):
            end = b',"end":true' if b'"end":true' in line[:80] else b""
            body = b'{"n":6,"e":1,"k":"epoch"' + end + b',"r":{}'
        crc = zlib.crc32(body, crc)
        out.append(body + b',"c":"%08x"}\n' % crc)
    log.write_bytes(b"".join(out))


def cut(log: Path) -> None:
    """Leave nothing behind the seventh record, which ends a turn."""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:7]))


def forge(manifest: Path) -> None:
    """Have a manifest say that nothing was folded, and that all it lists is the key."""
    said = json.loads(manifest.read_bytes())
    keys = {name: one for name, one in said["documents"].items() if name.startswith("keys/")}
    said = {name: said[name] for name in ("format", "key", "epoch")}
    said |= {"as_of_seq": 1, "documents": keys}
    body = json.dumps(said, separators=(",", ":")).encode()[:-1]
    manifest.write_bytes(body + b',"c":"%08x"}\n' % zlib.crc32(body))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    anyio.run(make, place)
    agent = place / "agents" / "ada"
    {"replace": edit, "cut": cut}[sys.argv[2]](agent / "log" / "1-0.jsonl")
    for path in agent.glob("*.json"):
        if path.name.startswith("manifest"):
            forge(path)
        elif path.name in {"session.json", "working_context_snapshot.json"}:
            path.unlink()
