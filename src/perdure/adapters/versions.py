"""Versions of the SDKs: which ones were tested, and what one of them cannot read of another's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from json import JSONDecodeError
from typing import Any, Final, TypeVar

from perdure._lib.logs import log_facts
from perdure.errors import FormatError, NotStorableError

T = TypeVar("T")

TESTED: Final = {
    "agent-framework-core": ("1.23.0", "1.23.0"),
    "claude-agent-sdk": ("0.2.189", "0.2.189"),
    "google-adk": ("2.13.0", "2.13.0"),
    "langgraph": ("1.2.22", "1.2.24"),
    "langgraph-checkpoint": ("4.3.2", "4.3.2"),
    "openai-agents": ("0.24.0", "0.24.0"),
    "pydantic-ai-harness": ("0.36.0", "0.62.0"),
    "pydantic-ai-slim": ("2.68.0", "2.68.0"),
}
"""The lowest and the newest version of each SDK that the tests have run with."""

_log = logging.getLogger(__name__)


@cache
def warn_untested(package: str) -> None:
    """Warn, once in a process, if the installed version of an SDK was not tested."""
    lowest, newest = TESTED[package]
    installed = _installed(package)
    if not _numbers(lowest) <= _numbers(installed) <= _numbers(newest):
        tested = lowest if lowest == newest else f"{lowest} to {newest}"
        log_facts(
            _log,
            logging.WARNING,
            "%(package)s %(version)s was not tested with this release of perdure, which knows "
            "%(tested)s",
            package=package,
            version=installed,
            tested=tested,
        )


def unreadable(what: str, package: str, error: ValueError) -> FormatError:
    """Return the error for what the installed version of an SDK does not know.

    Args:
        what: What was stored.
        package: The SDK.
        error: What the SDK or pydantic raised. Its message would show what was stored.

    """
    path, reason = _reason(error)
    message = (
        f"{what} cannot be read by {package} {_installed(package)} ({reason}): read it with the "
        "version that wrote it; `perdure export` gives it out as it is"
    )
    return FormatError(message, path=path)


def require_readable(what: str, package: str, read: Callable[[], T]) -> T:
    """Return what an SDK gives to be stored, as it would itself read it back.

    Args:
        what: What is to be stored.
        package: The SDK.
        read: Reads it, as it would be stored, with the SDK's own reader.

    Raises:
        NotStorableError: It cannot be read.

    """
    try:
        return read()
    except ValueError as error:
        path, reason = _reason(error)
        message = (
            f"{what} could never be read back by {package} {_installed(package)} ({reason}), so "
            "nothing was stored: give it what its class declares"
        )
        raise NotStorableError(message, path=path) from error


def _reason(error: ValueError) -> tuple[str, str]:
    """Return where something was met that is not read, and why; without the value itself."""
    details: Any = getattr(error, "errors", list)()
    path = ".".join(map(str, details[0]["loc"])) if details else ""
    if details:
        return path, f"{path}: {details[0]['msg']}"
    return path, "it is not JSON" if isinstance(error, JSONDecodeError) else "it has another shape"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a copy without metadata
        return "of an unknown version"


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)[:3]]
