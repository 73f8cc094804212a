"""The command table, and the mapping of results and errors to exit statuses and messages."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TextIO

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError, UnusedCliTokensError

import perdure
from perdure.cli.chat import chat
from perdure.cli.check import check, rebuild
from perdure.cli.checkpoints import checkpoints, diff, replay, rollback
from perdure.cli.config import archive, config
from perdure.cli.demo import demo
from perdure.cli.doctor import doctor, tune
from perdure.cli.inbox import inbox
from perdure.cli.output import fail, print_line
from perdure.cli.serve import inspect, serve
from perdure.cli.sessions import copy, forget, fork, ls, prune, rename, show
from perdure.cli.transfer import backup, export, import_, migrate, restore_backup
from perdure.cli.types import types
from perdure.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingExtraError,
    PerdureError,
)

FAILED = 1
USAGE = 2
INTERRUPTED = 130
"""The exit status that shells report for a command ended by Ctrl-C."""

COMMANDS: tuple[Callable[..., int | Awaitable[int]], ...] = (
    *(demo, chat, serve, ls, show, inspect, check, rebuild, inbox, types),
    *(checkpoints, diff, rollback, replay),
    *(fork, copy, rename, forget, prune),
    *(export, import_, migrate, backup, restore_backup, archive, config, tune, doctor),
)


def _shown_default(value: object) -> str | None:
    """Return a default as the help shows it; None for "off" or empty, which is not shown."""
    return None if value in (None, False, "", ()) else str(value)


app: App = App(
    name="perdure",
    help="Keep the state of long-running agents: look at it, check it, rebuild it.",
    version=perdure.__version__,
    default_parameter=Parameter(negative=(), show_default=_shown_default),
)
for _place, _function in enumerate(COMMANDS):
    app.command(_function, sort_key=_place)
app.register_install_completion_command(help="Complete commands and options in your shell.")


def run(tokens: Sequence[str]) -> int:
    """Run one command, and return its exit status."""
    given = _prepare_streams()
    try:
        status = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return _report_error(error, _usage_problem(error, tokens), USAGE, tokens)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has closed it, as `| head` does
        return FAILED
    except Exception as error:
        if "--debug" in tokens:
            raise
        return _failed(error, tokens)
    finally:
        _leave_stdout(given)
    return status if isinstance(status, int) else 0


def _prepare_streams() -> TextIO:
    """Make the streams fit for any text; return the stdout that there was."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    given = sys.stdout
    if isinstance(given, io.TextIOWrapper):
        stdout = given
        # With PYTHONUNBUFFERED a write that the system takes in part (the disk is full) ends there.
        if isinstance(given.buffer, io.RawIOBase):
            stdout = open(given.fileno(), "w", 1, given.encoding, closefd=False)  # noqa: SIM115
        stdout.reconfigure(errors="backslashreplace")  # the encoding may lack a character
        sys.stdout = stdout
    return given


def _usage_problem(error: CycloptsError, tokens: Sequence[str]) -> str:
    """Return why the arguments are invalid, and whose help says more."""
    if isinstance(error, UnusedCliTokensError):
        why = f"{' '.join(error.unused_tokens or ())!r} is more than the command takes"
    elif isinstance(error, UnknownCommandError) and tokens[0].startswith("-"):
        why = f"options come after the command: perdure COMMAND {tokens[0]}"
    else:
        why = str(error).partition(" Available commands")[0].rstrip(".")
    is_named = bool(tokens) and tokens[0] in {command.__name__ for command in COMMANDS}
    return f"{why}; see perdure {f'{tokens[0]} ' if is_named else ''}--help"


def _failed(error: Exception, tokens: Sequence[str]) -> int:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    message = f"{type(error).__name__}: {error}; run it again with --debug to see where"
    if isinstance(error, PerdureError):
        message = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    is_usage = type(error) in {ConfigError, InvalidArgumentError, MissingExtraError}
    return _report_error(error, message, USAGE if is_usage else FAILED, tokens)


def _report_error(error: Exception, message: str, status: int, tokens: Sequence[str]) -> int:
    """Print why a command failed, with ``--json`` also as JSON, and return *status*."""
    fail(message)
    if "--json" in tokens:
        value = {"type": type(error).__name__, "message": message, "status": status}
        # Where stdout takes nothing, that may be why the command failed.
        with contextlib.suppress(OSError):
            print_line({"error": value})
    return status


def _leave_stdout(given: TextIO) -> None:
    """Have what stdout does not take go nowhere: Python would try again at its end, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout = given
