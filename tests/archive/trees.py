"""Small trees of files, made and looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

Tree = dict[str, object]


def make(top: Path, files: Mapping[str, bytes | str | None]) -> Path:
    """Make files below a folder; None makes a folder."""
    top.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        target = top / path
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    return top


def look(top: Path, *, control: bool = False) -> Tree:
    """Return what is below a folder: contents of files, targets of links, None for folders."""
    found: Tree = {}
    for folder, folders, files in os.walk(top):
        if folder == str(top) and not control and ".perdure" in folders:
            folders.remove(".perdure")
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            key = str(path.relative_to(top))
            if stat.S_ISLNK(mode):
                found[key] = f"-> {os.readlink(path)}"
            elif stat.S_ISDIR(mode):
                found[key] = None
            elif stat.S_ISREG(mode):
                found[key] = path.read_bytes()
            else:
                found[key] = stat.S_IFMT(mode)
    return found
