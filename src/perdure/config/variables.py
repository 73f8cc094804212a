"""Values of template variables; the only module of this package with a clock and randomness."""

from __future__ import annotations

import datetime
import secrets
import uuid
from collections.abc import Callable, Mapping

from perdure.config.schema import ConfigKey, Initial, evaluate
from perdure.errors import TemplateError

Now = Callable[[], datetime.datetime]
Random = Callable[[int], bytes]
"""Returns so many random bytes."""


def utc_now() -> datetime.datetime:
    """Return the time, with its zone."""
    return datetime.datetime.now(datetime.UTC)


def initial_values(
    agent_name: str | None, *, now: Now = utc_now, random: Random = secrets.token_bytes
) -> Callable[[ConfigKey], Initial]:
    """Return what makes a key's initial value.

    Each occurrence of a variable is evaluated separately: two ``{{ random_id }}`` are two ids.

    Raises:
        TemplateError: A template uses the agent's name, and none was given.

    """

    def name() -> str:
        if agent_name is None:
            raise TemplateError(
                "a template names agent_name, which nobody has said: put an agent.yaml with "
                "`name: …` beside persistence.yaml, or give agent_name",
                variable="agent_name",
            )
        return agent_name

    variables: Mapping[str, Callable[[], str]] = {
        "agent_name": name,
        "random_id": lambda: random(4).hex(),
        "timestamp": lambda: _iso(now()),
        "uuid": lambda: str(uuid.UUID(bytes=random(16), version=4)),
    }

    def initial(key: ConfigKey) -> Initial:
        return evaluate(key.init, variables) if isinstance(key.init, str) else key.init

    return initial


def _iso(at: datetime.datetime) -> str:
    """Return a time as ISO 8601 has it, in UTC.

    >>> _iso(datetime.datetime(2026, 5, 4, 12, tzinfo=datetime.UTC))
    '2026-05-04T12:00:00.000Z'
    """
    utc = at.astimezone(datetime.UTC).isoformat(timespec="milliseconds")
    return utc.replace("+00:00", "Z")
