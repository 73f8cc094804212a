"""The commands, and how each of them ends: with a status, and without a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError, UnusedCliTokensError

import perdure
from perdure.cli import USAGE
from perdure.cli.archive import archive
from perdure.cli.backup import backup, migrate, restore_backup
from perdure.cli.chat import chat
from perdure.cli.check import check, rebuild
from perdure.cli.checkpoints import checkpoints, diff, rollback
from perdure.cli.config import config
from perdure.cli.demo import demo
from perdure.cli.doctor import doctor
from perdure.cli.export import export, import_
from perdure.cli.forget import forget, prune
from perdure.cli.inbox import inbox
from perdure.cli.output import fail, print_line
from perdure.cli.replay import replay
from perdure.cli.sessions import copy, fork, ls, rename, show
from perdure.cli.tune import tune
from perdure.errors import ConfigError, InvalidArgumentError, PerdureError

FAILED = 1
INTERRUPTED = 130
"""What a shell says of a command that Ctrl-C ended."""

COMMANDS: tuple[Callable[..., int], ...] = (
    *(demo, chat, ls, show, check, rebuild, inbox),
    *(checkpoints, diff, rollback, replay),
    *(fork, copy, rename, forget, prune),
    *(export, import_, migrate, backup, restore_backup, archive, config, tune, doctor),
)


def _shown_default(value: object) -> str | None:
    """Return what the help says of a default: nothing where it is "no"."""
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
    _prepare_streams()
    try:
        status = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        message = f"{_misfit(error, tokens)}; see perdure {_command(tokens)}--help"
        return _told(error, message, USAGE, tokens)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our answer has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if "--debug" in tokens:
            raise
        return _failed(error, tokens)
    return status if isinstance(status, int) else 0


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not know a letter
        sys.stdout.reconfigure(errors="backslashreplace")


def _misfit(error: CycloptsError, tokens: Sequence[str]) -> str:
    """Return why a call does not fit, without a full stop."""
    if isinstance(error, UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())!r} is more than the command takes"
    if isinstance(error, UnknownCommandError) and tokens[0].startswith("-"):
        return f"options stand behind the command: perdure COMMAND {tokens[0]}"
    return str(error).partition(" Available commands")[0].rstrip(".")


def _command(tokens: Sequence[str]) -> str:
    names = {command.__name__ for command in COMMANDS}
    return f"{tokens[0]} " if tokens and tokens[0] in names else ""


def _failed(error: Exception, tokens: Sequence[str]) -> int:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, PerdureError):
        status = USAGE if type(error) in {ConfigError, InvalidArgumentError} else FAILED
        return _told(error, str(error), status, tokens)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
        return _told(error, message, FAILED, tokens)
    message = f"{type(error).__name__}: {error}; run it again with --debug to see where"
    return _told(error, message, FAILED, tokens)


def _told(error: Exception, message: str, status: int, tokens: Sequence[str]) -> int:
    """Say why a command failed: to people, and with ``--json`` to programs."""
    fail(message)
    if "--json" in tokens:
        value = {"type": type(error).__name__, "message": message, "status": status}
        print_line({"error": value})
    return status
