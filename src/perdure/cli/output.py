"""Output of the commands: JSON for programs, tables and text for people; and their shared options.

Stored text is printed as text: never as markup, and with its control characters escaped, so that
stored data cannot control the reader's terminal.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from perdure._lib.logs import visible, visible_json
from perdure.errors import ConfigError
from perdure.records.keys import DEFAULT_SESSION, SessionKey, stored_key

KIB = 1024
WIDE = 10_000


def stderr() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress_bar(
    what: str, *columns: ProgressColumn, total: int | None = None
) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on a terminal; yield what updates it: done, and the total."""
    console = stderr()
    console.quiet = not console.is_terminal  # before rich 14.3 a disabled bar leaves an empty line
    shown = (TextColumn(what), BarColumn(), *columns)
    with Progress(*shown, console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def stdout() -> Console:
    """Return the console for answers; it wraps no lines if stdout is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE, soft_wrap=True)


def say(text: str) -> None:
    """Print a line for people."""
    stdout().print(Text(visible(text)))


def write(text: str) -> None:
    """Print a piece of a line at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(data: bytes) -> None:
    """Print JSON at once, always as UTF-8, independently of the terminal's encoding.

    Characters that would control a terminal are escaped, as JSON allows: programs read the same
    text.
    """
    sys.stdout.flush()
    sys.stdout.buffer.write(visible_json(data) + b"\n")
    sys.stdout.buffer.flush()


def fail(message: str) -> None:
    """Print why a command failed, in one line."""
    line = " ".join(visible(message).split())
    print(f"perdure: {line}", file=sys.stderr)


def note(message: str) -> None:
    """Print a note on stderr."""
    print(f"perdure: {visible(message)}", file=sys.stderr, flush=True)


def is_interactive() -> bool:
    """Return whether a person can be asked: stdin and stderr are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


_AGE = re.compile(r"(\d+(?:\.\d+)?)(d|h|w)?")
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0, None: 1.0}


def days(age: str) -> float:
    """Return the days of an ``--older-than``.

    >>> days("12h"), days("8w"), days("90")
    (0.5, 56.0, 90.0)
    """
    match = _AGE.fullmatch(age)
    if match is None:
        raise ConfigError(
            f"invalid --older-than {age!r}: give days, hours or weeks, as 90d, 12h, 8w",
            option="older-than",
            value=age,
        )
    return float(match[1]) * _DAYS[match[2]]


def confirmed(question: str) -> bool:
    """Ask a person whether to go on, on stderr: stdout is for the command's answer."""
    print(f"{visible(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def require_free(out: Path) -> None:
    """Raise unless a file or a folder can be made at a path."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose a new one, or remove it", out=str(out))
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{out}: there is no folder {out.absolute().parent}: make it first", out=str(out)
        )


def print_json(value: Any) -> None:
    """Print one JSON value."""
    write_json(msgspec.json.format(_json(value), indent=2))


def print_line(value: Any) -> None:
    """Print one JSON value in one line, for a command that prints several."""
    write_json(_json(value))


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a file's name may hold any bytes
        return msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=str)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(name): _as_text(item) for name, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list | tuple) else value


def print_table(columns: Sequence[str], rows: Iterable[Iterable[str]], *, right: str = "") -> None:
    """Print rows under their columns; the columns named in *right* hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = right.split()
    for column in columns:
        justify: Any = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    stdout().print(table)


def clip(text: str, width: int) -> str:
    """Return a text's first characters, in one line.

    >>> clip("one  two three", 9)
    'one two …'
    """
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, for people.

    >>> counted(1, "session"), counted(1200, "session")
    ('1 session', '1,200 sessions')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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


# The options that several commands share, each described once


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Answer:
    """Options for the output of a command."""

    json: bool = False
    """Print one JSON value on stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""

    def show(self, value: Any, text: str | Callable[[], object]) -> None:
        """Print a value with --json; else a line of text, or what a function prints."""
        if self.json:
            print_json(value)
        elif isinstance(text, str):
            say(text)
        else:
            text()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreOption(Answer):
    """The store that a command works on."""

    store: str | None = None
    """The sessions' store: a path, or a URL such as sqlite:///agents.db. Default: PERDURE_URL,
    else PERDURE_HOME, else the user's folder."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SessionOption(StoreOption):
    """The session of an agent that a command works on."""

    session: str = DEFAULT_SESSION
    """Which of the agent's sessions."""
    tenant: str = ""
    """The tenant, in a store that several tenants share."""

    def key(self, id: str) -> SessionKey:
        """Return the session's key."""
        return stored_key(id, self.session, self.tenant)
