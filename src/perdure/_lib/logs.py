"""Log lines with their facts and without repetition, and text from anywhere made safe to show.

`log_facts` is the one way to log what varies. An outage is logged in one line, and each damaged
item once. Control characters are escaped.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Hashable, Mapping
from typing import final

from perdure.errors import StoreUnavailableError

_MOST = 1000


def log_facts(
    log: logging.Logger,
    level: int,
    message: str,
    error: BaseException | None = None,
    /,
    **facts: object,
) -> None:
    """Log a message with its facts, both in the text and as fields of the record.

    The template stays constant, for tools that group by it. Facts that the message does not name,
    as ``%(path)s``, follow in parentheses.

    The message of a StoreUnavailableError says everything: it is logged in one line, and its
    traceback at debug level. Any other error is logged with its traceback.

    >>> import sys
    >>> logger = logging.getLogger("doc")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> log_facts(logger, logging.ERROR, "%(path)s is damaged", path="/a", bytes=7, took=0.51234)
    /a is damaged (bytes=7, took=0.512)
    """
    if not log.isEnabledFor(level):
        return
    others = [f"{name}=%({name})s" for name in facts if f"%({name})s" not in message]
    template = f"{message} ({', '.join(others)})" if others else message
    shown = {name: _shown(value) for name, value in facts.items()}
    if isinstance(error, StoreUnavailableError):
        line = f"{template}: %(error)s"
        log.log(level, line, {**shown, "error": error}, extra=facts, stacklevel=2)
        level = logging.DEBUG
    # A single mapping is what the names in the template refer to.
    arguments = (shown,) if shown else ()
    log.log(level, template, *arguments, extra=facts, exc_info=error, stacklevel=2)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else visible(str(value))


@final
class LogOnce:
    """A memory of what was logged, of limited size; for any thread."""

    def __init__(self) -> None:
        self._logged: dict[Hashable, None] = {}

    def first(self, what: Hashable) -> bool:
        """Return whether this is the first time."""
        if what in self._logged:
            return False
        if len(self._logged) >= _MOST:
            self._logged.clear()
        self._logged[what] = None
        return True


# Text from any source, shown safely


LONGEST = 200
_TURNING = r"\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""C1 controls, which some terminals obey, and marks that change the direction of text."""
_HIDDEN = re.compile(rf"[\x00-\x08\x0b-\x1f{_TURNING}\ud800-\udfff]")
_HIDDEN_IN_JSON = re.compile(rf"[{_TURNING}]")


def visible(text: str) -> str:
    r"""Return text with control characters, direction marks and lone surrogates escaped.

    >>> visible("a\x1b[2Jb"), visible("\udcff")
    ('a\\x1b[2Jb', '\\udcff')
    """
    return _HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_json(data: bytes) -> bytes:
    r"""Return JSON with the same characters escaped; encoders leave those beyond ASCII as they are.

    >>> visible_json('["\x9b2J \u202e"]'.encode())
    b'["\\u009b2J \\u202e"]'
    """
    text = data.decode()
    return _HIDDEN_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def card(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table, one row a fact.

    >>> card("Session", {"id": "<b>"})
    '<table><caption>Session</caption><tr><th>id</th><td>&lt;b&gt;</td></tr></table>'
    """
    rows = [
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items()
    ]
    return f"<table><caption>{_text(title)}</caption>{''.join(rows)}</table>"


def _text(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return html.escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
