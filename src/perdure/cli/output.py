"""What commands print: JSON for programs, tables and text for people.

Stored text is printed as text: never as markup, and with its control characters shown
instead of sent, so that what somebody stored cannot steer the terminal of whoever looks.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "ago",
    "clip",
    "fail",
    "print_json",
    "print_line",
    "print_table",
    "printable",
    "say",
    "size",
    "stderr",
    "write",
]

KIB = 1024
WIDE = 10_000
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def stderr() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """Return the console for answers; nothing is wrapped where a program reads."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE, soft_wrap=True)


def say(text: str) -> None:
    """Print a line for people."""
    stdout().print(Text(printable(text)))


def write(text: str) -> None:
    """Print a piece of a line at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def fail(message: str) -> None:
    """Print why a command failed, in one line."""
    line = " ".join(printable(message).split())
    print(f"perdure: {line}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    data = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    write(data.decode() + "\n")


def print_line(value: Any) -> None:
    """Print one JSON value in one line, for a command that answers in several."""
    write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Print rows under their columns; the columns named in *right* hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = right.split()
    for column in columns:
        justify: Any = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    stdout().print(table)


def printable(text: str) -> str:
    r"""Return text with its control characters shown.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def clip(text: str, width: int) -> str:
    """Return a text's first characters, in one line.

    >>> clip("one  two three", 9)
    'one two …'
    """
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def size(count: float) -> str:
    """Return bytes for people.

    >>> size(500), size(2048), size(5 * 1024**3)
    ('500 B', '2.0 KiB', '5.0 GiB')
    """
    if count < KIB:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= KIB
        if count < KIB:
            return f"{count:.1f} {unit}"
    return f"{count / KIB:.1f} GiB"


def ago(at: float | None, now: float) -> str:
    """Return how long ago a time was; the date beyond a month.

    >>> ago(100.0, 190.0), ago(None, 0.0)
    ('90 s ago', '')
    """
    if at is None:
        return ""
    past = max(now - at, 0.0)
    for unit, seconds, upto in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if past < upto:
            return f"{past // seconds:.0f} {unit} ago"
    if past < 30 * 86400:
        return f"{past // 86400:.0f} days ago"
    return datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat()
