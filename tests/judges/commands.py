"""The commands that judge, run in this process."""

from __future__ import annotations

import contextlib
import io
import os
import random
import secrets
from pathlib import Path
from typing import NamedTuple

from perdure.cli import main
from tests.judges.writers import FAMILIES

KEY = "5a" * 32


def place_of(kind: str, path: Path) -> str:
    """Return the URL of a store of a kind, at a path that is its alone."""
    if kind in {"encrypted", "compressed"}:
        os.environ["PERDURE_KEY"] = KEY
        return f"{kind}+{path.as_uri()}"
    if kind == "postgres":
        from tests.servers.postgres import schema_of, shared

        return f"{shared().url}?schema={schema_of(path)}"
    if kind == "redis":
        from tests.servers.valkey import shared as valkey

        return f"{valkey().url}?prefix={path.parent.name}-{path.name}"
    return f"sqlite:///{path}.db" if kind == "sqlite" else str(path)


class Ran(NamedTuple):
    """A command, and what it did."""

    words: list[str]
    status: int
    said: str

    @property
    def text(self) -> str:
        """All of it."""
        return f"$ perdure {' '.join(self.words)} -> {self.status}: {self.said.strip()}"

    @property
    def line(self) -> str:
        """In short."""
        return self.text.replace("\n", " / ")[:200]

    @property
    def is_problem(self) -> bool:
        """Whether it speaks against the store; a session may have gone meanwhile."""
        return self.status != 0 and "there is no session" not in self.said


def run(words: list[str]) -> Ran:
    """Run a command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(words)
    return Ran(words, status, said.getvalue())


def random_command(kind: str, url: str, top: Path, number: int, dice: random.Random) -> list[str]:
    """Return a command that judges a store, or copies it and says whether the copy is whole."""
    id = dice.choice(FAMILIES)
    backup, new = place_of(kind, top / "backup"), secrets.token_hex(4)
    choices = [
        ["check", "--store", url],
        ["check", id, "--store", url],
        ["checkpoints", id, "--verify", "--store", url],
        ["backup", url, backup, "--verify"],
        ["backup", url, place_of(kind, top / f"backup-{new}"), "--verify"],
        ["migrate", url, place_of(kind, top / "copy")],
        ["migrate", url, place_of(kind, top / f"copy-{new}")],
        ["export", id, "--layout", "bundle", "--out", str(top / new), "--store", url],
        ["export", id, "--out", str(top / new), "--store", url],
    ]
    return choices[dice.randrange(len(choices))]
